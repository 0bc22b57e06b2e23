"""A whole checkpoint that diffusers makes of a saved LoRA, as the guide says: for every family the merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from solrl_ray import models
from solrl_ray.config.schema import Lora
from solrl_ray.policy.merge import merged_weight
from solrl_ray.policy.saving import save_lora
from tests.support import families

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "conv_inverted", "conv_point", "to_qkv_mlp_proj"]
LORA = Lora(rank=4, alpha=10.0, targets=TARGETS)


def random_factors(transformer: nn.Module) -> dict[str, Tensor]:
    generator, factors = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for path, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and path.endswith(tuple(TARGETS)):
            factors[f"{path}.lora_A"] = torch.randn(4, module.in_features, generator=generator)
            factors[f"{path}.lora_B"] = torch.randn(module.out_features, 4, generator=generator)
    return factors


@pytest.mark.parametrize("name", families.BUILDERS)
def test_a_pipeline_with_the_lora_fused_is_saved_with_the_merged_weights(name: str, tmp_path: Path) -> None:
    base = families.BUILDERS[name](tmp_path / "base")
    config = families.model_config(name, base)
    factors = random_factors(models.family(config).skeleton(config))
    save_lora(tmp_path / "lora", factors, LORA, models.FAMILIES[name].convolutions)
    pipe = DiffusionPipeline.from_pretrained(base)
    before = {key: weight.clone() for key, weight in pipe.transformer.state_dict().items()}
    pipe.load_lora_weights(tmp_path / "lora")
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    pipe.save_pretrained(tmp_path / "whole")
    found = DiffusionPipeline.from_pretrained(tmp_path / "whole").transformer.state_dict()
    assert found.keys() == before.keys()
    for key, weight in before.items():
        linear = key.removesuffix(".weight")
        if f"{linear}.lora_A" in factors:
            a, b = factors[f"{linear}.lora_A"], factors[f"{linear}.lora_B"]
            merged = merged_weight(weight.flatten(1), a, b, 2.5).view(weight.shape)
            torch.testing.assert_close(found[key], merged, rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(found[key], weight)
