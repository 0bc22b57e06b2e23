"""A sampler for each shape of a run, so that a unit's forwards have the shape of its prompt's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from solrl_ray.config.schema import Config
from solrl_ray.models.base import DiffusionModel
from solrl_ray.prompts.prompt_set import shape_of
from solrl_ray.records import Prompt, PromptEmbedding, WorkUnit
from solrl_ray.rewards.base import Reward
from solrl_ray.rollout.sampler import Previewed, Sampled, Sampler


class Samplers:
    """Gives a unit to the `Sampler` of its prompt's shape. All share the model's modules."""

    def __init__(self, config: Config, model: DiffusionModel, reward: Reward, **options: Any) -> None:
        """`options` are those of `Sampler`."""
        self._run_seed, self._shapes = config.run.seed, config.model.shapes
        self._samplers = {
            shape: Sampler(config, model.of_shape(shape), reward, **options) for shape in config.model.shapes
        }

    @property
    def warm_ups(self) -> tuple[Callable[[PromptEmbedding], None], ...]:
        """`Sampler.warm_up` of each shape."""
        return tuple(sampler.warm_up for sampler in self._samplers.values())

    def __call__(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> Sampled:
        return self._of(prompt)(unit, prompt, embedding)

    def evaluate(self, unit: WorkUnit, prompts: Sequence[Prompt], embeddings: Sequence[PromptEmbedding]) -> Sampled:
        """The prompts are of one shape."""
        return self._of(prompts[0]).evaluate(unit, prompts, embeddings)

    def preview(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> Previewed:
        return self._of(prompt).preview(unit, prompt, embedding)

    def _of(self, prompt: Prompt) -> Sampler:
        return self._samplers[shape_of(prompt, self._shapes, self._run_seed)]
