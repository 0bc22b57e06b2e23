"""A checkpoint with a policy merged into it: for every family, what diffusers merges, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from solrl_ray import models
from solrl_ray.config.schema import Lora
from solrl_ray.errors import RunError, UserError
from solrl_ray.models import paths
from solrl_ray.policy import fusing
from solrl_ray.policy.merge import merged_weight
from solrl_ray.policy.saving import save_lora
from tests.support import families, tiny

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "conv_inverted", "conv_point", "to_qkv_mlp_proj"]
LORA = Lora(rank=4, alpha=10.0, targets=TARGETS)


def random_factors(transformer: nn.Module) -> dict[str, Tensor]:
    generator, factors = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for path, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and path.endswith(tuple(TARGETS)):
            factors[f"{path}.lora_A"] = torch.randn(4, module.in_features, generator=generator)
            factors[f"{path}.lora_B"] = torch.randn(module.out_features, 4, generator=generator)
    return factors


def fuse(
    base: Path,
    out: Path,
    factors: dict[str, Tensor],
    lora: Lora,
    dtype: torch.dtype = torch.float32,
    part_class: Any = FluxTransformer2DModel,
) -> None:
    """As ``solrl export --format checkpoint``."""
    part = {"subfolder": "transformer", "torch_dtype": dtype}
    transformer = paths.load_weights(part_class, base, "model.path", **part)
    fusing.merge_(transformer, factors, lora, base)
    fusing.write(base, out, transformer)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", families.BUILDERS)
def test_the_weights_are_those_that_diffusers_fuses_and_other_parts_stay(name: str, tmp_path: Path) -> None:
    base, out = families.BUILDERS[name](tmp_path / "base"), tmp_path / "made" / "fused"
    config = families.model_config(name, base)
    factors = random_factors(models.family(config).skeleton(config))
    (base / "flux1-dev.safetensors").write_bytes(b"the whole model once more")
    (base / "LICENSE.md").write_text("mine")
    fuse(base, out, factors, LORA, part_class=models.family(config).TRANSFORMER)

    stock = DiffusionPipeline.from_pretrained(base)
    before = {key: weight.clone() for key, weight in stock.transformer.state_dict().items()}
    save_lora(tmp_path, factors, LORA, models.FAMILIES[name].CONVOLUTIONS)
    stock.load_lora_weights(tmp_path)
    stock.fuse_lora()
    stock.unload_lora_weights()
    expected, found = stock.transformer.state_dict(), DiffusionPipeline.from_pretrained(out).transformer.state_dict()
    assert found.keys() == expected.keys()
    changed = {key for key in found if not torch.equal(found[key], before[key])}
    assert changed == {f"{key.removesuffix('.lora_A')}.weight" for key in factors if key.endswith(".lora_A")}
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-5, atol=1e-4)
    left = {key: content for key, content in files(base).items() if key != "flux1-dev.safetensors"}
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert {key: content for key, content in files(out).items() if key != weights} == {
        key: content for key, content in left.items() if key != weights
    }
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["fused"]


def test_weights_of_bfloat16_get_the_bits_of_a_regenerator(tiny_pipeline: Path, tmp_path: Path) -> None:
    base, out = tiny_copy(tiny_pipeline, tmp_path), tmp_path / "fused"
    transformer = FluxTransformer2DModel.from_pretrained(base / "transformer").to(torch.bfloat16)
    transformer.save_pretrained(base / "transformer", max_shard_size="40KB")
    (base / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    factors = random_factors(transformer)
    fuse(base, out, factors, LORA, torch.bfloat16)
    assert [path.name for path in (out / "transformer").glob("*.safetensors")] == [
        "diffusion_pytorch_model.safetensors"
    ]
    found = DiffusionPipeline.from_pretrained(out, dtype=torch.bfloat16).transformer
    for path, module in transformer.named_modules():
        if f"{path}.lora_A" in factors:
            a, b = factors[f"{path}.lora_A"], factors[f"{path}.lora_B"]
            weight = found.get_submodule(path).weight
            exact = module.weight.double() + 2.5 * b.double() @ a.double()
            assert weight.dtype == torch.bfloat16
            torch.testing.assert_close(weight, exact.to(torch.bfloat16), rtol=2**-7, atol=0)
            assert torch.equal(weight, merged_weight(module.weight.detach(), a, b, 2.5))


def tiny_copy(pipeline: Path, folder: Path) -> Path:
    for name, content in files(pipeline).items():
        (folder / "base" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "base" / name).write_bytes(content)
    return folder / "base"


INDEX = "diffusion_pytorch_model.safetensors.index.json"


def one_of_many(base: Path, name: str) -> None:
    (base / "transformer" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"x_embedder.weight": name}}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda base: (base / "transformer" / "diffusion_pytorch_model.safetensors").unlink(),
        lambda base: one_of_many(base, "missing.safetensors"),
        lambda base: (base / "transformer" / INDEX).write_text("[" * 100),
        lambda base: (base / "transformer" / "config.json").write_text("{"),
        lambda base: (base / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 99),
    ],
)
def test_a_damaged_checkpoint_is_told_and_nothing_is_left(
    damage: Callable[[Path], object], tiny_pipeline: Path, tmp_path: Path
) -> None:
    base = tiny_copy(tiny_pipeline, tmp_path)
    factors = random_factors(tiny.flux_transformer())
    damage(base)
    with pytest.raises(UserError, match=rf"model\.path is '{base}'"):
        fuse(base, tmp_path / "out", factors, LORA)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_copy_that_fails_leaves_nothing(tiny_pipeline: Path, tmp_path: Path) -> None:
    base = tiny_copy(tiny_pipeline, tmp_path)
    (base / "vae" / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunError, match=rf"{tmp_path / 'out'} cannot be written: .*No such file.*vae/gone"):
        fuse(base, tmp_path / "out", random_factors(tiny.flux_transformer()), LORA)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_another_checkpoint_is_refused(tiny_pipeline: Path, tmp_path: Path) -> None:
    factors = random_factors(tiny.flux_transformer())
    cases = {
        "transformer_blocks.7.attn.to_q": r"has no transformer_blocks\.7\.attn\.to_q\.weight",
        "x_embedder": r"has x_embedder\.weight of shape \(32, 16\)",
    }
    for key, problem in cases.items():
        other = {f"{key}.lora_A": torch.zeros(4, 9), f"{key}.lora_B": torch.zeros(5, 4)}
        with pytest.raises(UserError, match=rf"{problem}, but the policy changes a weight of shape \(5, 9\)"):
            fuse(tiny_pipeline, tmp_path / "out", factors | other, LORA)
    assert not list(tmp_path.iterdir())


def test_nothing_outside_the_checkpoint_is_copied(tiny_pipeline: Path, tmp_path: Path) -> None:
    base = tiny_copy(tiny_pipeline, tmp_path / "inner")
    (tmp_path / "inner" / "secret.txt").write_text("mine")
    index = json.loads((base / "model_index.json").read_text())
    index |= {name: ["diffusers", "AutoencoderKL"] for name in ("..", "../..", str(tmp_path), ".")}
    (base / "model_index.json").write_text(json.dumps(index))
    fuse(base, tmp_path / "out" / "fused", random_factors(tiny.flux_transformer()), LORA)
    assert files(tmp_path / "out").keys() == {f"fused/{name}" for name in files(base)}
