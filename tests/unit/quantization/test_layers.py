"""What every tier's linear promises: the stored weight in one canonical form, loaded in place; and FP8's numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from solrl_ray.quantization import fp8
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.formats import frozen_amax, pack
from solrl_ray.quantization.fp8_linear import FP8Linear
from solrl_ray.quantization.layers import QuantizedLinear
from solrl_ray.quantization.planning import packed_bytes
from tests.support.tensors import randn

LAYERS = [EmulatedNVFP4Linear, FP8Linear]


def linear(inputs: int = 64, outputs: int = 32, *, bias: bool = True, seed: int = 1) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    layer.weight.copy_(randn(outputs, inputs, seed=seed) / inputs**0.5)
    if bias:
        layer.bias.copy_(randn(outputs, seed=seed + 1))
    return layer


def packed(kind: type[QuantizedLinear], source: nn.Linear) -> dict[str, torch.Tensor]:
    return pack(kind.format, source.weight, frozen_amax(source.weight) if kind.format == "nvfp4" else None)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_stores_what_is_published_for_it(kind: type[QuantizedLinear]) -> None:
    source = linear()
    held, published = kind.from_linear(source).tensors(), packed(kind, source)
    assert held.keys() == published.keys()
    assert all(torch.equal(held[name], published[name]) for name in published)
    bulk = sum(tensor.nbytes for tensor in held.values() if tensor.dim())
    assert bulk == packed_bytes(kind.format, 32, 64)


@pytest.mark.parametrize("kind", LAYERS)
def test_loading_makes_the_layer_of_another_weight_at_the_same_addresses(kind: type[QuantizedLinear]) -> None:
    source, other, x = linear(), linear(seed=7), randn(5, 64)
    other.bias.copy_(source.bias)
    layer, wanted = kind.from_linear(source), kind.from_linear(other)
    addresses = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    assert not torch.equal(layer(x), wanted(x))
    layer.load(packed(kind, other))
    assert torch.equal(layer(x), wanted(x))
    assert {name: buffer.data_ptr() for name, buffer in layer.named_buffers()} == addresses


@pytest.mark.parametrize("kind", LAYERS)
def test_a_weight_that_is_not_the_layers_is_refused_and_changes_nothing(kind: type[QuantizedLinear]) -> None:
    layer, x = kind.from_linear(linear()), randn(5, 64)
    before, name = layer(x), next(iter(layer.tensors()))
    with pytest.raises(ValueError, match=rf"{name} is torch.uint8 \[16, \d+\], but this layer's is torch.uint8 \[32, "):
        layer.load(packed(kind, linear(outputs=16)))
    with pytest.raises(ValueError, match=rf"{name} is torch.float32"):
        layer.load({key: value.float() for key, value in layer.tensors().items()})
    with pytest.raises(ValueError, match=r"has the tensors \['other'\], but the layer stores \['"):
        layer.load({"other": torch.zeros(1)})
    assert torch.equal(layer(x), before)


def e4m3(value: float) -> float:
    """Rounds to E4M3 (no Inf, subnormals of 2^-9), ties to even, from the format's definition."""
    if value == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))), -6)
    step = 2.0 ** (exponent - 3)
    return float(np.rint(value / step) * step)


def test_a_row_is_scaled_by_the_power_of_two_that_just_fits_448() -> None:
    largest = torch.tensor([448.0, 449.0, 224.0, 225.0, 1.0, 1.75, 1.76, 0.0, 2.0**-40])
    x = torch.stack([largest, largest / 3], dim=1)
    wanted = [1.0, 2.0, 0.5, 1.0, 2.0**-8, 2.0**-8, 2.0**-7, 2.0**-101, 2.0**-48]
    assert fp8.row_scale(x).squeeze(1).tolist() == wanted


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30), tail=st.booleans())
def test_rows_are_rounded_once_to_the_nearest_e4m3_number(seed: int, exponent: int, tail: bool) -> None:
    x = randn(3, 32, seed=seed) * 2.0**exponent
    x = x * torch.exp(4 * randn(3, 32, seed=seed + 1)) if tail else x
    codes, scale = fp8.quantize_rows(x)
    for row, row_codes, s in zip(x.tolist(), codes.float().tolist(), scale.squeeze(1).tolist(), strict=True):
        assert math.log2(s).is_integer()
        assert 224 < max(map(abs, row)) / s <= 448
        assert row_codes == [e4m3(value / s) for value in row]


def test_an_fp8_linear_multiplies_exactly_what_its_codes_say() -> None:
    source, x = linear(128, 48), randn(20, 128, seed=5).to(torch.bfloat16)
    layer = FP8Linear.from_linear(source)
    codes, scale = fp8.quantize_rows(x.float())
    weight = layer.codes.view(torch.float8_e4m3fn).double() * layer.scale.double().unsqueeze(1)
    exact = (codes.double() * scale.double()) @ weight.t() + source.bias.to(torch.bfloat16).double()
    out = layer(x)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
    error = ((out.double() - source(x.float()).double()).norm() / source(x.float()).double().norm()).item()
    assert 0.02 < error < 0.05  # two operands of 31.6 dB each: sqrt(2) · 10^-1.58 = 0.037


def test_a_row_with_nan_is_seen_and_does_not_touch_the_others() -> None:
    layer, x = FP8Linear.from_linear(linear()), randn(4, 64)
    bad = x.clone()
    bad[2, 5], bad[3, 5] = float("nan"), float("inf")
    out = layer(bad)
    assert torch.equal(out[:2], layer(x)[:2])
    assert torch.isnan(out[2:]).all()


def test_a_weight_is_rounded_to_bfloat16_and_then_row_by_row() -> None:
    weight = linear().weight * torch.arange(1, 33).unsqueeze(1)
    codes, scale = fp8.quantize_rows(weight.to(torch.bfloat16).float())
    stored = pack("fp8-row", weight)
    assert torch.equal(stored["codes"], codes.view(torch.uint8))
    assert torch.equal(stored["scale"], scale.squeeze(1))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_somewhere_is_refused(wrong: float) -> None:
    weight = torch.ones(192, 32)
    weight[-1, 7] = wrong
    with pytest.raises(ValueError, match="cannot quantise a weight"):
        pack("fp8-row", weight)
    with pytest.raises(ValueError, match="cannot quantise a weight"):
        frozen_amax(weight)


def test_the_frozen_scale_has_room_above_the_largest_rounded_magnitude() -> None:
    assert frozen_amax(torch.tensor([[0.5, -2.001]])) == 1.5 * 2.0
