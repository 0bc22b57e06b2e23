"""On a GPU: FP8's bits and products, revisions under compiled code, Transformer Engine's quantiser."""

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from solrl_ray.config.schema import Compile, QuantizationScope
from solrl_ray.errors import UserError
from solrl_ray.models.compilation import compile_
from solrl_ray.quantization import attestation, capability, fp8, nvfp4
from solrl_ray.quantization.formats import pack
from solrl_ray.quantization.fp8_linear import FP8Linear
from solrl_ray.quantization.scope import quantize_, quantized_layers
from tests.support.tensors import randn
from tests.unit.quantization.test_scope import SKIP, inputs, transformer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda", 0)


def lacks(tier: str) -> bool:
    return not torch.cuda.is_available() or bool(capability.lacks(tier, CUDA))


fp8_card = pytest.mark.skipif(lacks("fp8"), reason="no card with FP8")
engine = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="no Transformer Engine")
REVISIONS = 5


def flux() -> nn.Module:
    model: nn.Module = transformer().requires_grad_(False).to(CUDA, torch.bfloat16)
    return model


def on_gpu() -> dict[str, torch.Tensor]:
    ids = ("img_ids", "txt_ids")
    return {n: t.to(CUDA) if n in ids else t.to(CUDA, torch.bfloat16) for n, t in inputs().items()}


def revise(model: nn.Module, revision: int) -> None:
    """Writes other weights into every quantised layer, in place."""
    for index, layer in enumerate(quantized_layers(model).values()):
        weight = randn(layer.out_features, layer.in_features, seed=100 * revision + index) / layer.in_features**0.5
        layer.load(pack(layer.format, weight, 2.0 if layer.format == "nvfp4" else None))


@fp8_card
def test_fp8_rows_have_the_bits_of_the_cpu() -> None:
    x = randn(257, 640) * torch.exp2(torch.linspace(-60, 60, 257)).unsqueeze(1)
    codes, scale = fp8.quantize_rows(x)
    on_card, card_scale = fp8.quantize_rows(x.to(CUDA))
    compiled, compiled_scale = torch.compile(fp8.quantize_rows, dynamic=False)(x.to(CUDA))
    for found, found_scale in ((on_card, card_scale), (compiled, compiled_scale)):
        assert torch.equal(found.view(torch.uint8).cpu(), codes.view(torch.uint8))
        assert torch.equal(found_scale.cpu(), scale)


@fp8_card
@pytest.mark.parametrize(("rows", "inputs_", "outputs"), [(48, 320, 96), (1024, 3072, 512), (17, 64, 16)])
def test_fp8_products_are_within_the_stated_tolerance(rows: int, inputs_: int, outputs: int) -> None:
    source = nn.Linear(inputs_, outputs).requires_grad_(False)
    source.weight.copy_(randn(outputs, inputs_, seed=1) / inputs_**0.5)
    layer = FP8Linear.from_linear(source.to(CUDA))
    x = randn(rows, inputs_, seed=2).to(torch.bfloat16)
    with torch.no_grad():
        out = layer(x.to(CUDA))
    exact, magnitude = attestation.exact_product(layer, x)
    error = ((out.double().cpu() - exact).abs() / magnitude).max().item()
    print(f"fp8 {rows} x {inputs_} -> {outputs}: largest error {error:.2e} of the sum of magnitudes")
    assert error <= attestation.TOLERANCE["cuda", "fp8"](inputs_)


@pytest.mark.parametrize("tier", ["fp8", "nvfp4-emulated", "nvfp4"])
def test_the_self_test_of_every_tier_that_the_card_has(tier: str) -> None:
    if capability.lacks(tier, CUDA):
        with pytest.raises(UserError, match=tier):
            capability.check(tier, CUDA)
        pytest.skip(capability.lacks(tier, CUDA))
    checks = attestation.check_tier(tier, CUDA)
    print("\n".join(f"{name}: {found}" for name, found in checks.items()))
    assert any(name.startswith("product") for name in checks)


@fp8_card
@pytest.mark.parametrize("tier", ["fp8", "bf16"])
def test_five_revisions_are_taken_without_compiling_again(tier: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, sample = flux(), on_gpu()
    quantize_(model, tier, QuantizationScope(skip=SKIP))
    assert compile_(model, Compile(), CUDA, tier).startswith("2 blocks")
    seen, compiled = [], []
    addresses = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for revision in range(REVISIONS):
            if tier == "bf16":
                for parameter in model.get_submodule("transformer_blocks").parameters():
                    parameter.add_(0.01 * (revision > 0))
            else:
                revise(model, revision)
            seen.append(model(**sample, return_dict=False)[0].clone())
            compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [2] * REVISIONS
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == addresses
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))


@fp8_card
@pytest.mark.parametrize("tier", ["fp8", "nvfp4-emulated"])
def test_a_model_that_is_quantised_on_its_way_to_the_card_has_the_bits_of_one_that_was_there(tier: str) -> None:
    there, coming = flux(), flux().cpu()
    quantize_(there, tier, QuantizationScope(skip=SKIP))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantize_(coming, tier, QuantizationScope(skip=SKIP), device=CUDA)
    found, wanted = coming.state_dict(), there.state_dict()
    assert found.keys() == wanted.keys()
    assert all(found[name].is_cuda and torch.equal(found[name], wanted[name]) for name in wanted)
    held = torch.cuda.memory_allocated() - before
    largest = max(each.in_features * each.out_features for each in quantized_layers(coming).values())
    # Beside what it holds in the end: one linear in bfloat16, and what quantising it takes in float32.
    assert torch.cuda.max_memory_allocated() - before <= held + 40 * largest


@fp8_card
def test_a_compiled_fp8_model_is_near_the_eager_one() -> None:
    torch._dynamo.reset()
    model, sample = flux(), on_gpu()
    quantize_(model, "fp8", QuantizationScope(skip=SKIP))
    with torch.no_grad():
        eager = model(**sample, return_dict=False)[0].float()
        compile_(model, Compile(), CUDA, "fp8")
        compiled = model(**sample, return_dict=False)[0].float()
    assert (compiled - eager).norm() / eager.norm() < 0.03


# Transformer Engine: what this card can run of the code that the nvfp4 tier is made of


def recipes() -> list[tuple[str, Callable[[], Any]]]:
    def current() -> Any:
        from transformer_engine.common.recipe import Float8CurrentScaling

        return Float8CurrentScaling()

    return [("Float8CurrentScaling", current)]


@engine
@fp8_card
@pytest.mark.parametrize(("name", "recipe"), recipes())
def test_an_engine_linear_is_refreshed_in_place(name: str, recipe: Callable[[], Any]) -> None:
    from solrl_ray.quantization.transformer_engine import EngineLinear

    bias = randn(96).to(CUDA, torch.bfloat16)
    layer = EngineLinear(320, 96, bias, recipe())
    x, address = randn(50, 320, seed=3).to(CUDA, torch.bfloat16), None
    for revision in range(REVISIONS):
        weight = (randn(96, 320, seed=revision) / 18).to(CUDA, torch.bfloat16)
        layer.refresh(weight)
        held = layer.linear.weight._data.data_ptr()
        assert address in (None, held)
        address = held
        with torch.no_grad():
            out = layer(x).float()
        wanted = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
        assert out.shape == (50, 96)
        assert (out - wanted).norm() / wanted.norm() < 0.06


@engine
@pytest.mark.parametrize("seed", range(5))
def test_the_engines_reference_quantiser_has_our_codes_and_scales(seed: int) -> None:
    from transformer_engine.pytorch.custom_recipes import reference_utils
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

    x = (randn(64, 320, seed=seed) * torch.exp(seed * randn(64, 320, seed=50 + seed) / 2)).to(CUDA, torch.bfloat16)
    quantizer = NVFP4QuantizerRef(dtype=reference_utils.Fp4Formats.E2M1, rowwise=True, columnwise=False)
    theirs, ours = quantizer.quantize(x), nvfp4.quantize(x)
    assert torch.equal(theirs.data.view(torch.uint8), ours.packed)
    assert torch.equal(theirs.scale.view(torch.uint8), ours.scales)
    assert float(theirs.global_amax_row) == float(ours.amax)


@engine
@pytest.mark.skipif(lacks("nvfp4"), reason="needs a Blackwell card")
def test_an_engine_nvfp4_linear_holds_what_was_published() -> None:
    from solrl_ray.quantization.transformer_engine import EngineNVFP4Linear

    weight = randn(96, 320) / 18
    tensors = pack("nvfp4", weight.to(CUDA), 2.0)
    layer = EngineNVFP4Linear(tensors, None, 320)
    assert all(torch.equal(layer.tensors()[name], tensor) for name, tensor in tensors.items())


@engine
@pytest.mark.skipif(not lacks("nvfp4"), reason="the card has NVFP4")
def test_delayed_scaling_with_an_e2m1_format_is_no_fp4() -> None:
    """It is per-tensor FP8: a product with FP8's error, or, where both operands come out as E5M2, none at all."""
    from transformer_engine.common.recipe import DelayedScaling, Format

    from solrl_ray.quantization.transformer_engine import EngineLinear

    x, weight = randn(64, 320).to(CUDA, torch.bfloat16), (randn(96, 320, seed=1) / 18).to(CUDA, torch.bfloat16)
    layer = EngineLinear(320, 96, None, DelayedScaling(fp8_format=Format.E2M1))
    layer.refresh(weight)
    try:
        with torch.no_grad():
            out = layer(x)
    except RuntimeError as error:
        if "Unable to find suitable cuBLAS GEMM algorithm" not in str(error):
            raise
        return
    wanted = torch.nn.functional.linear(x.float(), weight.float())
    assert (out.float() - wanted).norm() / wanted.norm() < 0.1  # FP4's would be 0.13
