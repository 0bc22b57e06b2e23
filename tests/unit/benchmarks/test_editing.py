"""Benchmarks of sampling, with families whose prompts have reference pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rehearsal
import torch
from rank_fidelity import Bench
from rollout import World

from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from tests.support.documents import ROOT
from tests.support.editing import with_prompts
from tests.support.families import BUILDERS, model_config

FAMILIES = ("flux_kontext", "flux2_klein", "qwen_image_edit")
SETTINGS = (
    "rollout={pool: 4, keep: 2, explore: {steps: 2, micro_batch: 2}, regenerate: {steps: 2, micro_batch: 2}}",
    "rollout.preview.prune=null",
)
Make = Callable[..., Config]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, tiny_clip: Path) -> Make:
    def made(family: str, references: int = 1) -> Config:
        folder = tmp_path_factory.mktemp(family)
        reward = f"rewards=[{{kind: clip_edit, path: '{tiny_clip}'}}]"  # fails without references
        config = load([ROOT / "configs" / "demo.yaml"], [reward, *SETTINGS])
        cfg = {"scale": 3.0, "negative_prompt": "dull"}
        model = model_config(family, BUILDERS[family](folder / "pipeline"), references=references, cfg=cfg)
        return with_prompts(config.model_copy(update={"model": model}), folder)

    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_and_a_ranking_are_of_prompts_with_their_references(family: str, make: Make, tmp_path: Path) -> None:
    config = make(family)
    world = World(config, torch.device("cpu"))
    assert world.embedding.references is not None
    world.naive()
    assert len(set(world.previews())) == 2
    world.regenerate([0, 3])
    world.decode_and_score(world.full.decode, 2)
    pools = Bench(config, 3, 2, tmp_path, "cpu").pools("float32", 2)
    assert pools.shape == (3, 2)


def test_prompts_without_references_are_refused_in_a_sentence(make: Make) -> None:
    config = make("flux_kontext").model_copy(update={"prompts": load([ROOT / "configs" / "demo.yaml"]).prompts})
    with pytest.raises(UserError, match=r"^prompts\.train: .*train\.txt, line 1 .* model\.references is 1"):
        World(config, torch.device("cpu"))
    with pytest.raises(UserError, match=r"^prompts\.heldout: .* model\.references is 1"):
        Bench(config, 1, 2, Path("unused"), "cpu")


def test_a_rehearsal_refuses_references_before_its_first_part(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^model\.references is 1 "):
        rehearsal.main(["flux", "--tiny", "--work", str(tmp_path), "--set", "model.references=1"])
    assert not list(tmp_path.iterdir())
