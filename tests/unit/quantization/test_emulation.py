"""The emulated linear: exact numerics, one quantisation for all consumers of a tensor, buffers in place."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from solrl_ray.quantization import nvfp4
from solrl_ray.quantization.activations import ActivationQuantizer, _on_device
from solrl_ray.quantization.attestation import check_vectors
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.formats import frozen_amax, pack
from tests.support.tensors import randn

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def linear(inputs: int, outputs: int, *, bias: bool = True, seed: int = 1) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    layer.weight.copy_(randn(outputs, inputs, seed=seed) / inputs**0.5)
    if bias:
        layer.bias.copy_(randn(outputs, seed=seed + 1))
    return layer


def awkward(rows: int, columns: int, seed: int, exponent: int, kind: str) -> torch.Tensor:
    """Activations of the kinds that break quantisers."""
    x = randn(rows, columns, seed=seed) * 2.0**exponent
    if kind == "heavy tail":
        x = x * torch.exp(5 * randn(rows, columns, seed=seed + 1))
    if kind == "outlier":
        x[rows // 2, columns // 2] = 1000 * x.abs().max()
    if kind == "zero blocks":
        x[::3, :16] = 0
    if kind == "coarse":  # few distinct values, as of bfloat16 or a ReLU: many exact ties
        x = (x / 2.0**exponent * 4).round() / 4 * 2.0**exponent
    if kind == "bfloat16":
        x = x.to(torch.bfloat16).float()
    return x


KINDS = st.sampled_from(["normal", "heavy tail", "outlier", "zero blocks", "coarse", "bfloat16"])


def quantised(source: nn.Linear, quantizer: ActivationQuantizer) -> EmulatedNVFP4Linear:
    layer = EmulatedNVFP4Linear.from_linear(source)
    layer.quantizer = quantizer
    return layer


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-60, 60),
    kind=KINDS,
)
def test_activations_are_quantised_to_the_bits_of_the_reference(
    rows: int, blocks: int, seed: int, exponent: int, kind: str
) -> None:
    x = awkward(rows, 32 * blocks, seed, exponent, kind)
    reference = nvfp4.quantize(x)
    for activation in (ActivationQuantizer()(x), _on_device(x)):
        assert torch.equal(activation.operand, reference.operand().to(activation.operand.dtype))
        assert float(activation.amax) == float(reference.amax)


SMALLEST = np.float32(2688 / np.finfo(np.float32).max)


@pytest.mark.parametrize(
    "amax", [0.0, 1e-45, 1e-42, 1e-38, SMALLEST, np.nextafter(SMALLEST, np.float32(0)), 5e-31, 2e-30, 3e38]
)
def test_activations_at_the_ends_of_float32_are_quantised_as_the_reference_does(amax: float) -> None:
    x = torch.full((2, 32), float(amax))
    x[0, :16] /= 3
    activation, reference = ActivationQuantizer()(x), nvfp4.quantize(x)
    assert torch.equal(activation.operand, reference.operand())
    assert activation.amax == float(reference.amax)


def test_exact_ties_are_rounded_as_the_reference_does() -> None:
    # With a tensor amax of 2688, a block amax of 96 = 6 · 16 has the block scale 16 exactly.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 16], x[0, 32] = 2688, 96, -96
    x[0, 17:24], x[0, 33:40] = 16 * ties, -16 * ties
    operand = ActivationQuantizer()(x).operand
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert operand[0, 17:24].tolist() == [16 * value for value in even]
    assert operand[0, 33:40].tolist() == [-16 * value for value in even]
    assert torch.equal(operand, nvfp4.quantize(x).operand())


@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(128, 96, True), (40, 24, False), (512, 128, True)])
def test_the_product_is_exact_up_to_float32_accumulation(inputs: int, outputs: int, bias: bool) -> None:
    source = linear(inputs, outputs, bias=bias)
    x = awkward(48, inputs, 5, 0, "outlier")
    out = EmulatedNVFP4Linear.from_linear(source)(x)
    a = nvfp4.quantize(nvfp4.pad_columns(x))
    w = nvfp4.NVFP4Tensor(**pack("nvfp4", source.weight, frozen_amax(source.weight)))
    alpha = float(a.amax) * float(w.amax) / (36 * 448**2)
    shift = source.bias.double() if bias else 0
    exact = a.operand().double() @ w.operand().double().t() * alpha + shift
    magnitude = a.operand().double().abs() @ w.operand().double().abs().t() * alpha + 1
    assert ((out.double() - exact).abs() / magnitude).max() < 1e-6


def test_bfloat16_output_is_rounded_once() -> None:
    source = linear(256, 64)
    x = randn(100, 256, seed=3).to(torch.bfloat16)
    layer = EmulatedNVFP4Linear.from_linear(source)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    a, w = nvfp4.quantize(x), layer.weight()
    alpha = float(a.amax) * float(w.amax) / (36 * 448**2)
    exact = a.operand().double() @ w.operand().double().t() * alpha + source.bias.double()
    wrong = (out != exact.float().to(torch.bfloat16)).double().mean()
    assert wrong < 0.002  # only where float32 accumulation crosses a rounding boundary; scales in bfloat16: half


def test_it_differs_from_the_float_linear_by_what_four_bits_cost() -> None:
    source = linear(256, 64)
    x = randn(200, 256, seed=3)
    wanted, found = source(x), EmulatedNVFP4Linear.from_linear(source)(x)
    error = ((found - wanted).norm() / (wanted - source.bias).norm()).item()
    assert 0.10 < error < 0.16  # two operands of 20.4 dB each: sqrt(2 · 10^-2.04) = 0.135


def test_leading_dimensions_are_kept_and_amax_spans_all_of_them() -> None:
    layer = EmulatedNVFP4Linear.from_linear(linear(64, 32))
    x = randn(3, 5, 64)
    x[2, 4, 0] = 1000.0
    assert torch.equal(layer(x), layer(x.view(15, 64).clone()).view(3, 5, 32))
    assert not torch.equal(layer(x)[:1], layer(x[:1].clone()))


def test_a_strided_input_is_taken_by_value() -> None:
    layer = EmulatedNVFP4Linear.from_linear(linear(64, 32))
    x = randn(6, 4, 64).transpose(0, 1)
    assert torch.equal(layer(x), layer(x.contiguous()))


def test_layers_with_one_quantiser_share_a_common_input() -> None:
    quantizer = ActivationQuantizer()
    query, key = (quantised(linear(64, 32, seed=s), quantizer) for s in (1, 2))
    x = randn(8, 64)
    with torch.no_grad():
        first, second = query(x), key(x)
    assert quantizer.shared == 1
    alone = EmulatedNVFP4Linear.from_linear(linear(64, 32, seed=2))
    assert torch.equal(second, alone(x))
    assert not torch.equal(first, second)


def test_an_input_changed_in_place_is_quantised_again() -> None:
    quantizer = ActivationQuantizer()
    layer = quantised(linear(64, 32), quantizer)
    x = randn(8, 64)
    before = layer(x)
    x[3] *= 7  # through a view
    after = layer(x)
    assert quantizer.shared == 0
    assert not torch.equal(before, after)
    assert torch.equal(after, EmulatedNVFP4Linear.from_linear(linear(64, 32))(x))


def test_another_tensor_at_the_same_address_is_quantised_again() -> None:
    quantizer = ActivationQuantizer()
    layer = quantised(linear(64, 32), quantizer)
    fresh = EmulatedNVFP4Linear.from_linear(linear(64, 32))
    addresses = set()
    for seed in range(20):
        x = randn(8, 64, seed=seed)
        addresses.add(x.data_ptr())
        assert torch.equal(layer(x), fresh(x.clone()))
        del x
    assert len(addresses) < 20  # the allocator did reuse memory
    assert quantizer.shared == 0


def test_inference_tensors_are_never_shared() -> None:
    quantizer = ActivationQuantizer()
    layer = quantised(linear(64, 32), quantizer)
    with torch.inference_mode():
        x = randn(8, 64)
        before = layer(x)
        x *= 3  # no version counter tells of this
        assert not torch.equal(layer(x), before)
    assert quantizer.shared == 0


def test_shapes_may_alternate() -> None:
    quantizer = ActivationQuantizer()
    layer = quantised(linear(64, 32), quantizer)
    small, large = randn(4, 64), randn(50, 64, seed=9)
    outs = [layer(x) for x in (small, large, small, large)]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])


def test_weights_have_headroom_and_are_rounded_to_bfloat16_first() -> None:
    weight = torch.full((2, 32), 1.00390625)  # 1 + 2^-8 rounds to 1 in bfloat16
    assert frozen_amax(weight) == 1.5
    layer = EmulatedNVFP4Linear(pack("nvfp4", weight, 1.5), None, 32)
    assert layer.weight().dequantize().unique().tolist() == pytest.approx([1.0], rel=0.07)


def test_it_refuses_nan() -> None:
    layer = EmulatedNVFP4Linear.from_linear(linear(32, 16))
    with pytest.raises(ValueError, match="NaN or Inf"):
        layer(torch.full((2, 32), float("nan")))
    with pytest.raises(ValueError, match="NaN or Inf"):
        layer(torch.full((2, 32), float("inf")))


def test_a_failed_quantisation_leaves_nothing_to_share() -> None:
    quantizer = ActivationQuantizer()
    layer = quantised(linear(32, 16), quantizer)
    x = randn(2, 32)
    layer(x)
    with pytest.raises(ValueError, match="NaN or Inf"):
        layer(torch.full((2, 32), float("nan")))
    assert torch.equal(layer(x), EmulatedNVFP4Linear.from_linear(linear(32, 16))(x))
    assert quantizer.shared == 0


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "heavy tail", "outlier", "zero blocks", "coarse", "bfloat16"])
def test_the_gpu_has_the_operands_of_the_reference(kind: str) -> None:
    x = awkward(64, 160, 4, 0, kind)
    activation, reference = ActivationQuantizer()(x.cuda()), nvfp4.quantize(x)
    assert activation.operand.dtype == torch.bfloat16
    assert torch.equal(activation.operand.float().cpu(), reference.operand())
    assert float(activation.amax) == float(reference.amax)


@gpu
@pytest.mark.gpu
def test_the_gpu_meets_the_known_answers() -> None:
    assert check_vectors(torch.device("cuda")).startswith("17 of 17")


@gpu
@pytest.mark.gpu
def test_the_gpu_rounds_exact_arithmetic_once() -> None:
    source = linear(512, 256)
    x = randn(300, 512, seed=3).to(torch.bfloat16)
    layer = EmulatedNVFP4Linear.from_linear(source.to("cuda", torch.bfloat16))
    out = layer(x.cuda()).cpu()
    a, w = nvfp4.quantize(x), layer.weight()
    alpha = float(a.amax) * float(w.amax) / (36 * 448**2)
    exact = a.operand().double() @ w.operand().double().cpu().t() * alpha + source.bias.double().cpu()
    wanted = exact.float().to(torch.bfloat16)
    assert (out != wanted).double().mean() < 0.002
    ulp = torch.nextafter(wanted.abs(), torch.tensor(float("inf"), dtype=torch.bfloat16)) - wanted.abs()
    assert ((out - wanted).abs() <= ulp).all()


@gpu
@pytest.mark.gpu
def test_not_finite_activations_stay_visible_on_the_gpu() -> None:
    layer = EmulatedNVFP4Linear.from_linear(linear(32, 16).cuda())
    x = randn(4, 32).cuda()
    x[1, 3] = float("nan")
    assert not torch.isfinite(layer(x)).any()
    x[1, 3] = float("inf")
    assert not torch.isfinite(layer(x)).any()
