"""A regenerator samples the chosen seeds again in full precision and scores them; the learner trains on these samples.
It also runs evaluations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from actors.cluster.progress_notes import noted
from actors.workers.devices import prepare
from actors.workers.sampling_worker import SamplingWorker
from solrl_ray import models, rewards
from solrl_ray.config.samplers import Ode
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import Sampling, full_tier
from solrl_ray.evaluation.held_out import reference_pictures
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.components import Component
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Attestation, Prompt, PromptEmbedding, SampleGroup, UnitResult, WorkUnit
from solrl_ray.rewards.base import IMAGES, Reward
from solrl_ray.rewards.preprocessing import eight_bits
from solrl_ray.rollout.sampler import Samplers, group_of, references_for
from solrl_ray.weight_sync.receive import Receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    unit: WorkUnit
    rewards: tuple[float, ...]
    images: torch.Tensor | None
    """float32 [n, 3, H, W] in [0, 1]; for videos uint8 [n, 3, T, H, W]; None unless requested."""
    seconds: float
    started: float
    """Seconds since 1970, by the worker's clock."""
    reward_costs: Mapping[str, int] = field(default_factory=dict)
    """See `UnitResult.reward_costs`."""
    columns: tuple[tuple[float, ...], ...] = ()
    """Scores of each reward function, in the order of the configuration."""
    beside: tuple[Evaluated, ...] = ()
    """Results of the unit's other prompts, each as if the prompt had its own unit."""


class Regenerator(SamplingWorker):
    role = "regenerator"

    def _title(self) -> str:
        return f"{self._name} samples in {self._config.model.dtype}"

    @noted
    def start(self) -> Attestation:
        """Build the model and attest its arithmetic."""
        config, tier = self._config, full_tier(self._config.model)
        worker, stage = config.fleet.regenerators, config.rollout.regenerate
        self._device = prepare(worker, deterministic=config.run.deterministic)
        components: set[Component] = {"transformer", "vae"}
        shared = self._shared
        if shared is None:
            self._model = models.load(config.model, self._device, components=components)
            receiver = Receiver(self._model.transformer)
        else:
            self._model = shared.load(self._device, components)
            receiver = shared.merged(self._model.transformer)
        self._reward = rewards.load(config.rewards, self._device) if shared is None else shared.reward(self._device)
        self._evaluate = evaluating(config, self._model, self._reward)
        return self._attest(
            self._model,
            quantize_(self._model.transformer, tier, config.model.quantization),
            self._reward,
            Sampling(tier=tier, steps=stage.steps, micro_batch=stage.micro_batch),
            threads=worker.threads,
            record=config.objective.needs_trajectory,
            receiver=receiver,
        )

    def _shapes(self) -> tuple[Callable[[PromptEmbedding], object], ...]:
        return *super()._shapes(), *self._evaluate.warm_ups

    def regenerate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[UnitResult, SampleGroup]:
        """Sample and score the chosen seeds with the loaded revision, which must be the unit's."""
        result, sampled = self._scored(self._sampler, unit, prompt, embedding)
        return result, group_of(result, sampled)

    def evaluate(
        self, unit: WorkUnit, prompts: Sequence[Prompt], pictures: int, *embeddings: PromptEmbedding
    ) -> Evaluated:
        """Score the loaded policy on the unit's prompts, at the fixed evaluation addresses.

        `pictures`: number of prompts, counted from the first, whose images are returned.
        """
        result, sampled = self._scored(self._evaluate.evaluate, unit, prompts, embeddings)
        evaluated, samples = [], len(unit.indices)
        for position, prompt in enumerate(prompts):
            rows = slice(position * samples, (position + 1) * samples)
            evaluated.append(
                Evaluated(
                    unit=replace(unit, prompt_id=prompt.id, beside=()) if position else unit,
                    rewards=result.rewards[rows],
                    images=_for_sending(sampled.images[rows]) if position < pictures else None,
                    seconds=result.seconds,
                    started=result.started,
                    reward_costs={} if position else result.reward_costs or {},
                    columns=tuple(zip(*result.components[rows], strict=True)),
                )
            )
        return replace(evaluated[0], beside=tuple(evaluated[1:]))

    def score_reference(
        self, unit: WorkUnit, prompts: Sequence[Prompt], pictures: int, *embeddings: PromptEmbedding
    ) -> Evaluated:
        """Score real images for the unit's only prompt, chosen by the function named in `evaluation.reference`.

        `embeddings` has the prompt's embedding if the model takes reference images. The function and the rewards then
        get these images.
        """
        (prompt,) = prompts
        embedding = embeddings[0] if embeddings else None
        began, started = time.time(), time.perf_counter()
        images = reference_pictures(self._config, unit, prompt, embedding)
        scored = images.to(self._device)
        seen = None if embedding is None else references_for(scored, embedding)
        scores = self._reward.score(scored, [prompt.text] * len(images), seen)
        return Evaluated(
            unit=unit,
            rewards=tuple(scores.float().cpu().tolist()),
            images=images if pictures else None,
            seconds=time.perf_counter() - started,
            started=began,
            reward_costs=self._reward.take_costs(),
        )


def _for_sending(images: torch.Tensor) -> torch.Tensor:
    """A copy of images on the CPU: a view would be sent together with the whole batch of its forward pass. Videos are
    large, so they are sent as uint8, the precision of their files.
    """
    return images.to("cpu", copy=True) if images.ndim == IMAGES else eight_bits(images).to(torch.uint8).cpu()


def evaluating(config: Config, model: DiffusionModel, reward: Reward) -> Samplers:
    """Samplers for evaluations: the ODE sampler, whole prompts in one micro-batch, guidance as in evaluations."""
    steps, micro_batch = config.evaluation.steps, config.evaluation.prompts_at_once * config.evaluation.samples
    guided = model.with_guidance(config.evaluated_model)
    return Samplers(config, guided, reward, steps=steps, micro_batch=micro_batch, sampler=Ode())
