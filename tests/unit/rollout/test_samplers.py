"""Units of prompts with different shapes, sampled by one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from solrl_ray import models
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.records import Prompt, PromptEmbedding, SampleShape, UnitResult, WorkUnit
from solrl_ray.rollout.sampler import Sampler, group_of
from solrl_ray.rollout.samplers import Samplers
from solrl_ray.validation.session import Brightness

CONFIGS = Path(__file__).parents[3] / "configs"
UNIT = WorkUnit(stage="regenerate", iteration=0, revision=0, prompt_id="p", indices=(3, 0, 5))
WIDE, TALL = SampleShape(24, 40), SampleShape(40, 24)
"""Of as many image tokens: nothing but their places tells them apart."""


def configured(resolution: str) -> Config:
    return load([CONFIGS / "demo.yaml"], [f"model.resolution={resolution}", "rollout.regenerate={steps: 3}"])


@pytest.mark.parametrize("shape", [WIDE, TALL], ids=str)
def test_a_unit_is_sampled_at_its_prompts_shape_as_in_a_run_of_that_shape_alone(shape: SampleShape) -> None:
    several, alone = configured("[[24, 40], [40, 24]]"), configured(f"[{shape.height}, {shape.width}]")
    loaded = models.load(several.model, "cpu", components={"text", "transformer", "vae"})
    prompt = Prompt(id="p", text="a red ring", shape=shape)
    embedding = PromptEmbedding(prompt_id="p", tensors=loaded.encode([prompt.text])[0], digest="p")
    samplers = Samplers(several, loaded, Brightness("brightness"), steps=3, micro_batch=2)
    of_one = Sampler(alone, loaded.of_shape(shape), Brightness("brightness"), steps=3, micro_batch=2)
    found, expected = samplers(UNIT, prompt, embedding), of_one(UNIT, prompt, embedding)

    assert found.images.shape == (3, 3, shape.height, shape.width)
    assert torch.equal(found.latents, expected.latents)
    assert torch.equal(found.images, expected.images)
    assert torch.equal(samplers.preview(UNIT, prompt, embedding).rewards, found.rewards)
    result = UnitResult(unit=UNIT, rewards=tuple(found.rewards.tolist()), worker="w", score_class="", seconds=0.0)
    assert (group_of(result, found).shape, group_of(result, expected).shape) == (shape, None)
    assert len(samplers.warm_ups) == 2
