"""What SANA alone has: 1×1 convolutions that become linears, and a mask of the text's padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.sana_transformer import GLUMBConv
from torch import nn

from solrl_ray import models
from solrl_ray.config.schema import Lora, Model
from solrl_ray.models.sana_layers import LinearGLU, as_linear
from solrl_ray.policy.reading import load_lora
from solrl_ray.policy.saving import save_lora
from solrl_ray.policy.tool_names import Network
from solrl_ray.quantization.scope import quantize_
from tests.support import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_sana(tmp_path_factory.mktemp("sana") / "pipeline")


def config(path: Path, **changes: object) -> Model:
    return tiny.model_config(path, family="sana", resolution=32, **changes)


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Products and sums of these are exact, in whatever order they are taken."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_made_of_a_convolution_computes_the_same_numbers(bias: bool) -> None:
    convolution = nn.Conv2d(6, 10, 1, bias=bias).requires_grad_(False)
    convolution.weight.copy_(whole_numbers(10, 6, 1, 1, seed=0))
    if convolution.bias is not None:
        convolution.bias.copy_(whole_numbers(10, seed=1))
    x = whole_numbers(2, 6, 3, 5, seed=2)
    linear = as_linear(convolution)
    assert torch.equal(linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), convolution(x))
    assert linear.weight.data_ptr() == convolution.weight.data_ptr()


def test_only_1x1_convolutions_are_linears() -> None:
    with pytest.raises(ValueError, match=r"a convolution of \(3, 3\), groups 1 is no linear"):
        as_linear(nn.Conv2d(4, 4, 3))
    with pytest.raises(ValueError, match="groups 4 is no linear"):
        as_linear(nn.Conv2d(4, 4, 1, groups=4))
    with pytest.raises(ValueError, match="is not SANA's"):
        LinearGLU(GLUMBConv(4, 4))


@pytest.mark.parametrize(("skip", "others"), [(["attn", "embed", "proj"], 0), (["attn1", "embed", "proj"], 8)])
def test_a_stock_checkpoint_quantises_in_its_feed_forward(path: Path, skip: list[str], others: int) -> None:
    model = models.load(config(path, quantization={"skip": skip}), "cpu")
    report = quantize_(model.transformer, "nvfp4-emulated", model.config.quantization)
    assert sum(name.endswith(models.FAMILIES["sana"].CONVOLUTIONS) for name in report.layers) == 4
    assert len(report.layers) == 4 + others
    latents = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    embedding = {name: tensor[None] for name, tensor in model.encode(["a red square"])[0].items()}
    with torch.no_grad():
        assert torch.isfinite(model.velocity(latents, 0.5, embedding)).all()


def test_padding_of_the_text_does_not_change_the_velocity(path: Path) -> None:
    model = models.load(config(path), "cpu", components={"text", "transformer"})
    embedding = {name: tensor[None] for name, tensor in model.encode(["ab"])[0].items()}
    assert 0 < embedding["prompt_attention_mask"].sum() < tiny.T5_TOKENS
    padding = embedding["prompt_attention_mask"] == 0
    changed = embedding | {"prompt_embeds": embedding["prompt_embeds"].masked_fill(padding[..., None], 5.0)}
    latents = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model.velocity(latents, 0.5, embedding), model.velocity(latents, 0.5, changed))


def test_lora_factors_of_convolutions_are_read_as_matrices(tmp_path: Path) -> None:
    linear = "transformer_blocks.0.ff.conv_point"
    factors = {f"{linear}.lora_A": torch.ones(2, 6), f"{linear}.lora_B": torch.ones(4, 2)}
    lora = Lora(rank=2, alpha=2.0, targets=["conv_point"])
    file = save_lora(tmp_path, factors, lora, models.FAMILIES["sana"].CONVOLUTIONS)
    loaded = load_lora(file, lora, Network("SanaTransformer2DModel", {linear: 4}, None))
    assert all(torch.equal(loaded[name], factor) for name, factor in factors.items())
