"""Units of prompts with different shapes, sampled by one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from solrl_ray import models
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.records import Prompt, PromptEmbedding, SampleShape, UnitResult, WorkUnit
from solrl_ray.rollout.sampler import Sampler, Samplers, group_of
from tests.support.brightness import Brightness

CONFIGS = Path(__file__).parents[3] / "configs"
UNIT = WorkUnit(stage="regenerate", iteration=0, revision=0, prompt_id="p", indices=(3, 0, 5))
WIDE, TALL = SampleShape(24, 40), SampleShape(40, 24)
"""Of as many image tokens: nothing but their places tells them apart."""


class Scored(Brightness):
    """Ten thousand times as much for what is blue."""

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        assert len(images) == len(prompts) in (3, 6)  # nothing else is paid for
        factors = [1e4 if "blue" in prompt else 1.0 for prompt in prompts]
        return super().compute(images, prompts) * torch.tensor(factors)


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
    assert samplers.preview(UNIT, prompt, embedding).rewards == found.rewards
    result = UnitResult(unit=UNIT, rewards=found.rewards, worker="w", score_class="", seconds=0.0)
    assert (group_of(result, found).shape, group_of(result, expected).shape) == (shape, None)
    assert len(samplers.warm_ups) == 2


def test_prompts_that_are_evaluated_together_have_the_samples_that_they_have_alone() -> None:
    config = configured("32")
    loaded = models.load(config.model, "cpu", components={"text", "transformer", "vae"})
    prompts = [Prompt(id=name, text=text) for name, text in (("p", "a red ring"), ("q", "two blue squares"))]
    encoded = zip(prompts, loaded.encode([prompt.text for prompt in prompts]), strict=True)
    embeddings = [PromptEmbedding(prompt_id=p.id, tensors=tensors, digest=p.id) for p, tensors in encoded]
    unit = WorkUnit(stage="evaluate", iteration=4, revision=4, prompt_id="p", indices=(0, 1, 2), beside=("q",))

    def sampler(micro_batch: int) -> Sampler:
        return Sampler(config, loaded, Scored("brightness"), steps=3, micro_batch=micro_batch)

    found = sampler(8).evaluate(unit, prompts, embeddings)  # with room for two more
    alone = [
        sampler(3)(replace(unit, prompt_id=prompt.id, beside=()), prompt, embedding)
        for prompt, embedding in zip(prompts, embeddings, strict=True)
    ]
    assert found.rewards == pytest.approx([reward for each in alone for reward in each.rewards], rel=1e-5, abs=1e-5)
    for name in ("latents", "images"):
        expected = torch.cat([getattr(each, name) for each in alone])
        torch.testing.assert_close(getattr(found, name), expected, rtol=1e-5, atol=1e-5)
    assert max(found.rewards[:3]) < 2
    assert min(found.rewards[3:]) > 2
    exactly = sampler(3).evaluate(replace(unit, beside=()), prompts[:1], embeddings[:1])
    assert torch.equal(exactly.latents, alone[0].latents)
    with pytest.raises(ValueError, match="prompts or embeddings of another unit"):
        sampler(8).evaluate(unit, prompts, embeddings[::-1])
