"""Which linears of a FLUX-class transformer are quantised, and what is said about the rest."""

import copy

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from solrl_ray.config.schema import QuantizationScope
from solrl_ray.errors import UserError
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.scope import quantize_, quantized_layers
from tests.support import tiny

SKIP = ["x_embedder", "context_embedder", "time_text_embed", "norm", "^proj_out"]


def transformer() -> FluxTransformer2DModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny.flux_transformer().eval()


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(2, 16, 16, generator=generator),
        "encoder_hidden_states": torch.randn(2, 6, 32, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(6, 3),
    }


def test_exactly_the_linears_in_the_scope_are_replaced() -> None:
    model = transformer()
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    report = quantize_(model, "nvfp4-emulated", QuantizationScope(skip=SKIP))
    double, single = "transformer_blocks.0.", "single_transformer_blocks.0."
    attention = ["to_q", "to_k", "to_v"]
    assert set(report.layers) == {
        *(f"{double}attn.{name}" for name in [*attention, "add_q_proj", "add_k_proj", "add_v_proj"]),
        *(f"{double}attn.{name}" for name in ["to_out.0", "to_add_out"]),
        *(f"{double}{part}.net.{i}" for part in ("ff", "ff_context") for i in ("0.proj", "2")),
        *(f"{single}attn.{name}" for name in attention),
        f"{single}proj_mlp",
        f"{single}proj_out",
    }
    assert set(report.layers) == set(quantized_layers(model))
    assert set(report.layers) | set(report.skipped) == linears
    assert report.skipped["proj_out"] == "path matches '^proj_out'"
    assert report.skipped[f"{double}norm1.linear"] == "path matches 'norm'"
    # width 32: 8 + 3 of 32x32, 2 x 2 + 1 of 32x128, the single block's output 160x32
    assert report.quantized_parameters == 11 * 32 * 32 + 5 * 32 * 128 + 160 * 32
    assert report.skipped_parameters > 0


def test_small_linears_may_be_left_alone() -> None:
    model = transformer()
    report = quantize_(model, "nvfp4-emulated", QuantizationScope(skip=SKIP, min_features=32))
    assert len(report.layers) == 6
    assert report.skipped["transformer_blocks.0.attn.to_q"] == "max(in, out) features 32 <= min_features 32"


def test_the_quantised_model_runs_and_is_near_the_float_one() -> None:
    model = transformer()
    quantized = copy.deepcopy(model)
    quantize_(quantized, "nvfp4-emulated", QuantizationScope(skip=SKIP))
    with torch.no_grad():
        wanted, found = model(**inputs()).sample, quantized(**inputs()).sample
    error = float((found - wanted).norm() / wanted.norm())
    assert 1e-4 < error < 0.2


def test_consumers_of_one_tensor_quantise_it_once() -> None:
    model = transformer()
    quantize_(model, "nvfp4-emulated", QuantizationScope(skip=SKIP))
    layers = quantized_layers(model)
    quantizer = next(iter(layers.values())).quantizer
    assert all(layer.quantizer is quantizer for layer in layers.values())
    with torch.no_grad():
        model(**inputs())
    # key and value of both streams of the double block; the single block's mlp, then its query, key, value
    assert quantizer.shared == 4 + 3


def test_an_unquantised_tier_changes_nothing() -> None:
    model = transformer()
    report = quantize_(model, "float32", QuantizationScope(skip=SKIP))
    assert report.layers == ()
    assert set(report.skipped.values()) == {"tier float32 quantises nothing"}
    assert not quantized_layers(model)


def test_a_tier_that_the_device_lacks_is_refused_with_those_that_it_has() -> None:
    sentence = (
        r"tier fp8 does not run on cpu: .* 8\.9 or newer. Set rollout\.explore\.precision to nvfp4-emulated, or to bf16"
    )
    with pytest.raises(UserError, match=sentence):
        quantize_(transformer(), "fp8", QuantizationScope())


def test_a_scope_that_leaves_nothing_is_refused() -> None:
    model = transformer()
    with pytest.raises(UserError, match=r"none of the model's \d+ linears.*min_features` \(4096\)"):
        quantize_(model, "nvfp4-emulated", QuantizationScope(min_features=4096))
    assert not any(isinstance(module, EmulatedNVFP4Linear) for module in model.modules())
