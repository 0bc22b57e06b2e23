"""Previews of videos that decode only some latent frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from solrl_ray import models
from solrl_ray.records import Prompt, PromptEmbedding, Pruning, WorkUnit
from solrl_ray.rewards.base import VIDEOS, Reward
from solrl_ray.rollout.sampler import Sampler
from tests.support import tiny_wan
from tests.support.families import model_config
from tests.support.small import small_config

PROMPT = Prompt(id="p", text="a red square")


class Brightness(Reward):
    """The mean of all frames; keeps the numbers of frames that it got."""

    ndims = (VIDEOS,)

    def __init__(self) -> None:
        super().__init__("brightness")
        self.frames: list[int] = []

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self.frames.append(images.shape[2])
        return images.flatten(1).mean(dim=1)


@pytest.mark.parametrize("prune", [None, Pruning(after=1, keep=2)])
@pytest.mark.parametrize(("chosen", "decoded"), [([0, 1], 5), ([0, 2], 5), ([1], 1), (None, 9)])
def test_a_preview_is_scored_on_the_chosen_latent_frames_and_a_sample_on_all(
    chosen: list[int] | None, decoded: int, prune: Pruning | None, tmp_path: Path
) -> None:
    model = models.load(model_config("wan", tiny_wan.build_wan(tmp_path / "pipeline")), "cpu")
    given = "null" if chosen is None else str(chosen)
    config = small_config(tmp_path, "run", f"rollout.preview.latent_frames={given}")
    config = config.model_copy(update={"model": model.config})
    reward = Brightness()
    sampler = Sampler(config, model, reward, steps=2, micro_batch=2)
    (text,) = model.encode([PROMPT.text])
    embedding = PromptEmbedding(prompt_id=PROMPT.id, tensors=text, digest="d")
    unit = WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=PROMPT.id, indices=(0, 1, 2, 3), prune=prune)
    previewed = sampler.preview(unit, PROMPT, embedding)
    assert set(reward.frames) == {decoded}
    reward.frames.clear()
    sampled = sampler(WorkUnit("sample", 0, 0, PROMPT.id, unit.indices), PROMPT, embedding)
    assert set(reward.frames) == {tiny_wan.FRAMES}
    assert sampled.images.shape[2] == tiny_wan.FRAMES
    if prune is None:
        latents = sampled.latents if chosen is None else sampled.latents[:, :, chosen]
        expected = torch.cat([model.decode(part).flatten(1).mean(dim=1) for part in latents.split(2)])
        torch.testing.assert_close(torch.tensor(previewed.rewards), expected, atol=1e-6, rtol=0)
