"""The NVFP4 format: known answers bit for bit, and what the format promises on any data."""

import json
from importlib import resources

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl_ray.quantization import nvfp4
from tests.support.tensors import randn

VECTORS = json.loads(resources.files("solrl_ray.quantization").joinpath("vectors.json").read_text())["vectors"]


def floats(hexadecimal: str, shape: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(hexadecimal), "<f4").astype(np.float32).reshape(shape))


def hexadecimal(tensor: torch.Tensor) -> str:
    return tensor.cpu().contiguous().numpy().tobytes().hex()


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_known_answers_bit_for_bit(vector: dict) -> None:
    x = floats(vector["input"], vector["shape"])
    quantized = nvfp4.quantize(x, vector["amax_override"])
    assert hexadecimal(quantized.packed) == vector["packed"]
    assert hexadecimal(quantized.scales) == vector["scales"]
    assert float(quantized.amax) == vector["amax"]
    global_scale = (quantized.amax.cpu() / 2688).numpy().tobytes()[::-1].hex()
    assert global_scale == vector["global_scale"]
    assert hexadecimal(quantized.dequantize()) == vector["dequantized"]


def test_numpy_input_gives_the_bits_of_torch_input() -> None:
    x = randn(4, 64)
    assert torch.equal(nvfp4.quantize(x.numpy()).packed, nvfp4.quantize(x).packed)


def test_the_global_scale_comes_from_a_true_division() -> None:
    # 2688 / 3.84375 is 699.317…; as 2688 · fl(1/3.84375) it is one ulp off, which moves ties of E2M1.
    amax = torch.tensor(3.84375)
    assert float(nvfp4.encode_scale(amax)) == float(np.float32(2688) / np.float32(3.84375))
    assert float(nvfp4.encode_scale(amax)) != float(amax.reciprocal() * 2688)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_values_are_refused(bad: float) -> None:
    x = torch.ones(1, 16)
    x[0, 15] = bad
    with pytest.raises(ValueError, match="NaN or Inf"):
        nvfp4.quantize(x)
    with pytest.raises(ValueError, match="NaN or Inf"):
        nvfp4.quantize(x, amax=1.0)
    with pytest.raises(ValueError, match="NaN or Inf"):
        nvfp4.quantize(torch.ones(1, 16), amax=bad)


def test_shapes_that_do_not_divide_into_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 16"):
        nvfp4.quantize(torch.ones(1, 20))
    with pytest.raises(ValueError, match="blocks of 16"):
        nvfp4.quantize(torch.ones(16))


def test_the_even_index_sits_in_the_low_nibble() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    assert nvfp4.pack(codes).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(nvfp4.unpack(nvfp4.pack(codes)), codes)


def test_ties_round_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nvfp4.values_to_codes(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    above, below = torch.nextafter(ties, torch.tensor(9.0)), torch.nextafter(ties, torch.tensor(0.0))
    assert nvfp4.values_to_codes(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert nvfp4.values_to_codes(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert nvfp4.values_to_codes(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_columns_are_padded_to_32_with_zeros_that_change_nothing() -> None:
    x = randn(3, 80)
    padded = nvfp4.pad_columns(x)
    assert padded.shape == (3, 96)
    assert nvfp4.pad_columns(padded) is padded
    wide, narrow = nvfp4.quantize(padded), nvfp4.quantize(x)
    assert torch.equal(wide.packed[:, :40], narrow.packed)
    assert wide.operand()[:, 80:].abs().max() == 0


def test_every_operand_is_exact_in_bfloat16() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8).view(-1, 1)
    tensor = nvfp4.NVFP4Tensor(packed=nvfp4.pack(codes), scales=scales, amax=torch.tensor(1.0))
    assert torch.equal(tensor.operand(torch.bfloat16).float(), tensor.operand())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30), spread=st.floats(0, 4))
def test_each_element_is_within_half_a_step_of_its_input(seed: int, exponent: int, spread: float) -> None:
    x = randn(8, 64, seed=seed) * torch.exp(spread * randn(8, 64, seed=seed + 1)) * 2.0**exponent
    quantized = nvfp4.quantize(x)
    block_amax = x.abs().view(8, 4, 16).amax(-1, keepdim=True)
    # The widest step of E2M1 is 2 of 6; the block scale adds its own rounding.
    bound = block_amax * (1 / 6 + 1 / 16) * 1.001 + float(quantized.amax) / 448 * 2**-9
    assert ((quantized.dequantize() - x).abs().view(8, 4, 16) <= bound).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_quantising_what_was_dequantised_changes_nothing(seed: int) -> None:
    first = nvfp4.quantize(randn(4, 64, seed=seed).to(torch.bfloat16))
    second = nvfp4.quantize(first.dequantize(), amax=float(first.amax))
    assert torch.allclose(second.dequantize(), first.dequantize(), rtol=1e-6, atol=0)


def test_a_frozen_amax_with_headroom_costs_no_accuracy() -> None:
    x = randn(256, 256)

    def signal_to_noise(amax: float) -> float:
        noise = nvfp4.quantize(x, amax).dequantize() - x
        return float(10 * torch.log10(x.square().sum() / noise.square().sum()))

    natural = float(x.abs().max())
    assert signal_to_noise(natural) == pytest.approx(20.4, abs=0.15)
    assert signal_to_noise(1.5 * natural) == pytest.approx(signal_to_noise(natural), abs=0.05)


@pytest.mark.parametrize("tiny", [2.0**-40, 1e-37])
def test_a_block_that_is_tiny_beside_the_tensors_amax_becomes_zero_and_no_other_changes(tiny: float) -> None:
    """Its scale underflows. Its elements are then scaled by the largest float32, as in Transformer Engine: 0 stays 0,
    others become ±6 times a scale of 0.
    """
    x = torch.zeros(1, 32)
    x[0, 1], x[0, 2], x[0, 16:] = tiny, -tiny, 2.0
    quantized = nvfp4.quantize(x, amax=1e4)
    assert quantized.scales[0, 0] == 0
    assert nvfp4.unpack(quantized.packed)[0, :4].tolist() == [0, 7, 15, 0]
    assert quantized.dequantize()[0, :16].abs().max() == 0
    assert quantized.dequantize()[0, 16:].unique().item() == pytest.approx(2.0, rel=0.07)


@pytest.mark.parametrize("amax", [0.7, 3.0, 12345.0, 3e38])
def test_block_scales_that_are_nearly_ties_come_from_float32_products_in_the_documented_order(amax: float) -> None:
    """``block amax · (2688 / amax · 1/6)``: another order rounds many of these blocks to the other neighbour."""
    f = np.float32
    factor = f(2688) / f(amax) * f(1 / 6)
    numbers = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    ties = ((numbers[1:] + numbers[:-1]) / 2 / float(factor)).astype(f)
    amaxes = np.concatenate([np.nextafter(ties, f(0)), ties, np.nextafter(ties, f(np.inf))])
    products = torch.from_numpy(amaxes * factor)
    quantized = nvfp4.quantize(np.repeat(amaxes[:, None], 16, axis=1), amax=float(f(amax)))
    assert torch.equal(quantized.scales[:, 0], products.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("amax", [0.7, 3.0, 12345.0])
def test_elements_that_are_nearly_ties_are_scaled_by_float32_operations_in_the_documented_order(amax: float) -> None:
    """``x · (1 / (block scale · (1 / encode)))``: another order rounds some of these to the other neighbour."""
    f = np.float32
    encode = f(2688) / f(amax)
    scales = torch.arange(8, 126, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()[:, None]
    element_scales = f(1) / (scales * (f(1) / encode))
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = (ties / element_scales.astype(np.float64)).astype(f)
    largest = (scales / (encode * f(1 / 6))).astype(f)  # gives the block its scale
    blocks = [np.concatenate([largest, np.nextafter(near, f(side)), near], axis=1) for side in (0, np.inf)]
    x = np.concatenate([np.pad(block, ((0, 0), (0, 1))) for block in blocks], axis=1)
    quantized = nvfp4.quantize(x, amax=float(f(amax)))
    assert torch.equal(quantized.scales.view(torch.float8_e4m3fn).float(), torch.from_numpy(scales).expand(-1, 2))
    scaled = x * element_scales
    below = np.searchsorted(ties, scaled)  # of a tie, the code below it
    is_tie = scaled == ties[np.minimum(below, 6)]
    assert np.array_equal(nvfp4.unpack(quantized.packed).numpy(), below + (is_tie & (below % 2 == 1)))


@pytest.mark.parametrize("amax", [1e30, 3e38, float(np.finfo(np.float32).max)])
def test_a_huge_amax_leaves_the_scale_of_its_own_block(amax: float) -> None:
    quantized = nvfp4.quantize(torch.full((1, 16), amax))
    assert quantized.scales.item() == 0x7E  # 448
    assert nvfp4.unpack(quantized.packed).unique().item() == 7
    assert quantized.dequantize().unique().item() == pytest.approx(amax, rel=1e-6)


def test_a_block_beyond_a_given_amax_saturates() -> None:
    quantized = nvfp4.quantize(torch.full((1, 16), 4.0), amax=1.0)
    assert quantized.scales.item() == 0x7E
    assert quantized.dequantize().unique().item() == pytest.approx(1.0)
