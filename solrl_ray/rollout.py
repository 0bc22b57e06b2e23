"""From a work unit to scored images: what explorers and regenerators share, without Ray.

A unit's indices are addressed noise; solver, decoder and reward follow. The forward's shape is always
`micro_batch`: a short last one repeats its last member, whose surplus results are dropped. So a score is a function
of its unit alone (design law 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from solrl_ray.config.schema import Config
from solrl_ray.models.base import DiffusionModel
from solrl_ray.noise import initial_noise
from solrl_ray.records import Address, Prompt, PromptEmbedding, WorkUnit
from solrl_ray.rewards.base import Reward
from solrl_ray.sampling.schedules import sigmas
from solrl_ray.sampling.solvers import integrate

NOISE_PURPOSES = {"preview": "initial-noise", "full": "initial-noise", "evaluate": "evaluation-noise"}
"""Preview and full share their noise: that is what makes a regenerated image the previewed one, in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What became of a unit. All on the CPU, in the order of the unit's indices."""

    latents: Tensor
    """Clean latents x0, float32 [n, *latent_shape]."""
    images: Tensor
    """float32 [n, 3, H, W] in [0, 1]."""
    rewards: Tensor
    """float32 [n]."""


def addresses(unit: WorkUnit, run_seed: int) -> list[Address]:
    """Where the initial noise of a unit's samples comes from. Evaluation noise is the same in every iteration."""
    evaluating = unit.stage == "evaluate"
    return [
        Address(
            run_seed=run_seed,
            purpose=NOISE_PURPOSES[unit.stage],
            iteration=0 if evaluating else unit.iteration,
            prompt_id=unit.prompt_id,
            index=index,
        )
        for index in unit.indices
    ]


class Sampler:
    """Samples, decodes and scores units of one stage with one model."""

    def __init__(self, config: Config, model: DiffusionModel, reward: Reward, *, steps: int, micro_batch: int) -> None:
        self._run_seed = config.run.seed
        self._solver = config.rollout.solver
        self._model = model
        self._reward = reward
        self._micro_batch = micro_batch
        self._sigmas = sigmas(config.model.schedule, steps, model.image_tokens)

    # Not inference mode: its tensors lack the version counter by which q, k and v share a quantised input.
    @torch.no_grad()
    def __call__(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> Sampled:
        """Raises RewardError if the reward fails, ValueError if the embedding is of another prompt."""
        if not unit.prompt_id == prompt.id == embedding.prompt_id:
            raise ValueError(f"unit {unit.id} came with prompt {prompt.id} and the embedding of {embedding.prompt_id}")
        noise = initial_noise(addresses(unit, self._run_seed), self._model.latent_shape)
        batch = self._model.batch_embeddings([embedding] * self._micro_batch)
        parts = [self._one(part, prompt, batch) for part in self._micro_batches(noise)]
        count = len(unit.indices)
        latents, images, rewards = (torch.cat(tensors)[:count] for tensors in zip(*parts, strict=True))
        return Sampled(latents=latents, images=images, rewards=rewards)

    def _micro_batches(self, noise: Tensor) -> Iterator[Tensor]:
        for start in range(0, len(noise), self._micro_batch):
            part = noise[start : start + self._micro_batch]
            missing = self._micro_batch - len(part)
            yield torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) if missing else part

    def _one(self, noise: Tensor, prompt: Prompt, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        latents = integrate(
            lambda state, sigma: self._model.velocity(state, sigma, batch),
            noise.to(self._model.device),
            self._sigmas,
            self._solver,
        )
        images = self._model.decode(latents)
        rewards = self._reward.score(images, [prompt.text] * len(images))
        return latents.float().cpu(), images.float().cpu(), rewards.float().cpu()
