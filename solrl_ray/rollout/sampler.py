"""Samples and scores a work unit: noise, solver, decoder, reward. Shared by explorers and regenerators; without Ray.

Noise is addressed: it is drawn from the unit's indices. Every forward has `micro_batch` rows: a short last micro-batch
repeats its last member, and the surplus results are discarded. So a score is a function of its unit alone (design
law 3). A stochastic sampler also addresses the noise of every step, and previews use the noise of the full trajectory.

Pruned units keep this property: the unit's early scores decide which members continue. Those members form new
micro-batches of the same shape, in the order of their indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from solrl_ray.config.samplers import Ode, SamplerConfig
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import reward_weights
from solrl_ray.models.base import DiffusionModel
from solrl_ray.objectives.gdpo import normalized_sums
from solrl_ray.prompts.prompt_set import shape_of
from solrl_ray.records import (
    Address,
    Prompt,
    PromptEmbedding,
    SampleGroup,
    SampleShape,
    Scores,
    Trajectory,
    UnitResult,
    WorkUnit,
)
from solrl_ray.rewards.base import Reward
from solrl_ray.rollout.selection import survivors
from solrl_ray.sampling import sde, solvers
from solrl_ray.sampling.drawing import Drawing
from solrl_ray.sampling.noise import initial_noise, uniform
from solrl_ray.sampling.schedules import sigmas
from solrl_ray.sampling.solvers import SolverState

Scorer = Callable[[Tensor], Tensor]
ODE = Ode()
WARM_UP_SIGMA = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled(Scores):
    """The samples of a unit with their scores, in the order of its indices."""

    latents: Tensor
    """Clean latents x0, float32 [n, *latent_shape], on the sampling device."""
    images: Tensor
    """float32 [n, 3, H, W], of videos [n, 3, T, H, W], in [0, 1], on the sampling device."""
    trajectory: Trajectory | None = None
    """Recorded states, on the CPU; None if the sampler does not record."""
    shape: SampleShape | None = None
    """Shape of the samples; None if the run has only one."""
    reward_costs: Mapping[str, int] = field(default_factory=dict)
    """Costs of scoring (`Reward.take_costs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Previewed(Scores):
    """The scores of a unit of previews, in the order of its indices. Images and latents are discarded."""

    reward_costs: Mapping[str, int]
    """Costs of the early and the final scoring together (`Reward.take_costs`)."""


def addresses(unit: WorkUnit, run_seed: int, sampler: SamplerConfig = ODE) -> list[Address]:
    """The addresses of a unit's initial noise.

    Exploration and regeneration use the same noise, so a regenerated image is the preview in full quality. With
    `shared_noise` all candidates of a prompt use the same noise. Evaluation noise is the same in every iteration.
    """
    purpose, iteration = ("initial-noise", unit.iteration) if unit.stage != "evaluate" else ("evaluation-noise", 0)
    prompt = Address(run_seed=run_seed, purpose=purpose, iteration=iteration, prompt_id=unit.prompt_id)
    shared = not isinstance(sampler, Ode) and sampler.shared_noise
    return [prompt if shared else replace(prompt, index=index) for index in unit.indices]


def window_start(sampler: SamplerConfig, unit: WorkUnit, run_seed: int) -> int:
    """First step that adds noise, the same for all candidates of a prompt; 0 without a window."""
    window = None if isinstance(sampler, Ode) else sampler.window
    if window is None:
        return 0
    low, high = window.range
    address = Address(run_seed=run_seed, purpose="sde-window", iteration=unit.iteration, prompt_id=unit.prompt_id)
    return low + int(uniform(address, (1,))[0] * (high - window.size - low + 1))


def references_for(images: Tensor, embedding: PromptEmbedding) -> Tensor | None:
    """The prompt's reference images as passed to rewards: float32 [B, n, 3, H, W] in [0, 1]; None if it has none.

    B and the device are those of `images`; all rows share one copy (`expand`).
    """
    seen = embedding.references
    return None if seen is None else (seen.to(images.device).float() / 255).expand(len(images), *seen.shape)


class Sampler:
    """Samples, decodes and scores units of one stage and of one shape, the shape of `model`."""

    def __init__(
        self,
        config: Config,
        model: DiffusionModel,
        reward: Reward,
        *,
        steps: int,
        micro_batch: int,
        sampler: SamplerConfig | None = None,
        record: bool = False,
    ) -> None:
        """
        Args:
            steps: solver steps of a sample.
            micro_batch: rows of every forward.
            sampler: None: `rollout.sampler`.
            record: keep the transitions that can be trained on; only for full trajectories of a stochastic sampler.
        """
        self._run_seed = config.run.seed
        self._drawing = Drawing.of(config, steps)
        self._sampler = config.rollout.sampler if sampler is None else sampler
        self._model = model
        self._shape = model.shape if len(config.model.shapes) > 1 else None
        self._reward = reward
        self._weights = reward_weights(config)
        self._micro_batch = micro_batch
        self._record = record
        self._previewed_frames = config.rollout.preview.latent_frames
        self._regenerate_steps = config.rollout.regenerate.steps

    @torch.no_grad()
    def warm_up(self, embedding: PromptEmbedding) -> None:
        """Run one forward and one decoding in the units' shapes, so that they are compiled."""
        batch = self._model.batch_embeddings([embedding] * self._micro_batch)
        where = [Address(run_seed=self._run_seed, purpose="warm-up", index=i) for i in range(self._micro_batch)]
        noise = initial_noise(where, self._model.latent_shape).to(self._model.device)
        self._model.decode(self._model.velocity(noise, WARM_UP_SIGMA, batch))

    # Not inference mode: its tensors lack the version counter by which q, k and v share a quantised input.
    @torch.no_grad()
    def __call__(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> Sampled:
        """Sample a unit to the end. It must not be pruned; only previews can be.

        Raises RewardError if the reward fails, ValueError if the unit is pruned or the embedding is of another prompt.
        """
        if unit.prune is not None:
            raise ValueError(f"{unit.describe()} is pruned; only previews can be")
        batch, scored = self._batch(unit, prompt, embedding), self._scorer((prompt, embedding))
        parts = [self._one(part, scored, batch) for part in self._micro_batches(unit)]
        count = len(unit.indices)
        latents, images, scores, states = (torch.cat(tensors)[:count] for tensors in zip(*parts, strict=True))
        start = window_start(self._sampler, unit, self._run_seed)
        return Sampled(
            **_columns(scores),
            latents=latents,
            images=images,
            trajectory=Trajectory(states=states, first_step=start) if self._record else None,
            shape=self._shape,
            reward_costs=self._reward.take_costs(),
        )

    @torch.no_grad()
    def evaluate(self, unit: WorkUnit, prompts: Sequence[Prompt], embeddings: Sequence[PromptEmbedding]) -> Sampled:
        """Sample a unit of an evaluation, at most one micro-batch; results are ordered by prompt.

        The rows that fill up the micro-batch are not scored, because some rewards cost money.

        Raises RewardError if the reward fails, ValueError if the prompts or the embeddings are not the unit's.
        """
        wanted, samples = (unit.prompt_id, *unit.beside), len(unit.indices)
        if any(wanted != tuple(given) for given in ((p.id for p in prompts), (e.prompt_id for e in embeddings))):
            raise ValueError(f"{unit.describe()} came with the prompts or embeddings of another unit")
        spare = self._micro_batch - samples * len(wanted)
        batch = self._model.batch_embeddings([e for e in embeddings for _ in unit.indices] + [embeddings[-1]] * spare)
        where = [a for name in wanted for a in addresses(replace(unit, prompt_id=name), self._run_seed, self._sampler)]
        noise = initial_noise(where + where[-1:] * spare, self._model.latent_shape).to(self._model.device)
        state, _ = self._advance(unit, SolverState(noise), batch)
        count = len(where)
        images = self._model.decode(state.latents)[:count]
        scores = self._scorer(*zip(prompts, embeddings, strict=True), each=True)(images)
        return Sampled(
            **_columns(scores),
            latents=state.latents[:count].float(),
            images=images.float(),
            shape=self._shape,
            reward_costs=self._reward.take_costs(),
        )

    @torch.no_grad()
    def preview(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> Previewed:
        """Score a unit of previews, which may be pruned.

        Raises RewardError if the reward fails, ValueError if the embedding is of another prompt.
        """
        batch, scored = self._batch(unit, prompt, embedding), self._scorer((prompt, embedding))
        count = len(unit.indices)
        if unit.prune is None:
            ends = (self._advance(part, self._noise(part), batch)[0] for part in self._micro_batches(unit))
            parts = [scored(self._decode_preview(end.latents)) for end in ends]
            return Previewed(**_columns(torch.cat(parts)[:count]), reward_costs=self._reward.take_costs())
        begun = [
            self._advance(part, self._noise(part), batch, end=unit.prune.after)[0] for part in self._micro_batches(unit)
        ]
        estimates = [state.x0 for state in begun if state.x0 is not None]  # never None after a step
        early = torch.cat([scored(self._decode_preview(x0)) for x0 in estimates])[:count]
        deciding = early[:, 0]
        if self._weights:
            deciding = torch.from_numpy(normalized_sums(early[:, 1:], self._weights)).float()
        kept = survivors(deciding.tolist(), unit.prune.keep)
        final = self._finish(unit, solvers.together(begun), kept, scored, batch)
        return Previewed(
            **_columns(early.index_copy(0, torch.tensor(kept), final)),
            early=tuple(deciding.tolist()),
            reward_costs=self._reward.take_costs(),
        )

    def _finish(
        self, unit: WorkUnit, state: SolverState, kept: Sequence[int], scored: Scorer, batch: dict[str, Tensor]
    ) -> Tensor:
        """Continue the members at positions `kept` from `state`, in new micro-batches; returns their scores."""
        assert unit.prune is not None
        place = {unit.indices[position]: position for position in kept}
        scores = []
        for part in self._micro_batches(replace(unit, indices=tuple(place))):
            rows = torch.tensor([place[index] for index in part.indices], device=state.latents.device)
            end, _ = self._advance(part, state.rows(rows), batch, first=unit.prune.after)
            scores.append(scored(self._decode_preview(end.latents)))
        return torch.cat(scores)[: len(kept)]

    def _batch(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> dict[str, Tensor]:
        """The embeddings of a micro-batch: those of the prompt, once per row."""
        if not unit.prompt_id == prompt.id == embedding.prompt_id:
            raise ValueError(
                f"{unit.describe()} came with prompt {prompt.id} and the embedding of {embedding.prompt_id}"
            )
        return self._model.batch_embeddings([embedding] * self._micro_batch)

    def _micro_batches(self, unit: WorkUnit) -> Iterator[WorkUnit]:
        """Split the unit into micro-batches; the last one is filled up with its last index."""
        for start in range(0, len(unit.indices), self._micro_batch):
            part = unit.indices[start : start + self._micro_batch]
            yield replace(unit, indices=part + part[-1:] * (self._micro_batch - len(part)))

    def _one(self, part: WorkUnit, scored: Scorer, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Latents, images, scores and recorded states of a micro-batch; the states are empty if none are recorded."""
        state, states = self._advance(part, self._noise(part), batch)
        images = self._model.decode(state.latents)
        scores = scored(images)
        kept = torch.stack([state.float().cpu() for state in states], dim=1) if states else torch.empty(len(scores), 0)
        return state.latents.float(), images.float(), scores, kept

    def _noise(self, part: WorkUnit) -> SolverState:
        noise = initial_noise(addresses(part, self._run_seed, self._sampler), self._model.latent_shape)
        return SolverState(noise.to(self._model.device))

    def _decode_preview(self, latents: Tensor) -> Tensor:
        """Decode previews to images. For videos, only the latent frames of `rollout.preview` are decoded."""
        if self._previewed_frames is not None:
            latents = latents[:, :, self._previewed_frames]
        return self._model.decode(latents)

    def _scorer(self, *members: tuple[Prompt, PromptEmbedding], each: bool = False) -> Scorer:
        """A function that scores images: the first B / len(members) images belong to the first member, and so on.

        Returns float32 [B, 1] on the CPU, the total reward. With `each`, or if rewards have their own statistics,
        [B, 1 + rewards]: the total, then the value of each reward.
        """

        def scores(images: Tensor) -> Tensor:
            parts = images.chunk(len(members))
            prompts = [prompt.text for part, (prompt, _) in zip(parts, members, strict=True) for _ in part]
            references = [references_for(part, embedding) for part, (_, embedding) in zip(parts, members, strict=True)]
            given = [images for images in references if images is not None]  # all prompts have references, or none has
            seen = torch.cat(given) if len(given) > 1 else given[0] if given else None
            if self._weights or each:
                return self._reward.score_each(images, prompts, seen).float().cpu()
            return self._reward.score(images, prompts, seen).float().cpu()[:, None]

        return scores

    def _advance(
        self, part: WorkUnit, state: SolverState, batch: dict[str, Tensor], *, first: int = 0, end: int | None = None
    ) -> tuple[SolverState, Sequence[Tensor]]:
        """Make steps ``first … end - 1`` of a micro-batch, by default all of them.

        Returns the new state, and the states before and after each recorded transition (none if none is recorded).
        """

        def velocity(latents: Tensor, sigma: float) -> Tensor:
            return self._model.velocity(latents, sigma, batch)

        total = self._drawing.steps
        if isinstance(self._sampler, Ode):
            sigmas, end = self._sigmas(part), total if end is None else end
            return solvers.advance(velocity, state, sigmas, self._drawing.solver, first=first, end=end), ()
        start = window_start(self._sampler, part, self._run_seed)
        steps = sde.plan(self._sampler, self._sigmas(part).tolist(), total, start)[first:end]
        increments = {index: self._increment(part, index) for step in steps for index, _ in step.increments}
        recorded = range(start, start + self._sampler.recorded(self._drawing.steps) + 1) if self._record else ()
        return sde.integrate(velocity, state, steps, increments, keep=recorded)

    def _sigmas(self, part: WorkUnit) -> Tensor:
        """Noise levels of a micro-batch.

        With the ODE sampler, the published grid of this sampler's number of steps. With a stochastic sampler, the grid
        of `rollout.regenerate.steps`; previews take their levels from it.
        """
        steps = self._drawing.steps if isinstance(self._sampler, Ode) else self._regenerate_steps
        return sigmas(self._drawing.model.schedule, steps, self._model.image_tokens)

    def _increment(self, part: WorkUnit, step: int) -> Tensor:
        """The noise that step `step` of the full schedule adds to each candidate."""
        address = Address(run_seed=self._run_seed, purpose="sde-increment", iteration=part.iteration, step=step)
        where = [replace(address, prompt_id=part.prompt_id, index=index) for index in part.indices]
        return initial_noise(where, self._model.latent_shape).to(self._model.device)


class Samplers:
    """One `Sampler` per shape of a run; all share the model's modules.

    A unit is sampled by the sampler of its prompt's shape.
    """

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
        """`Sampler.evaluate`; all prompts must have the same shape."""
        return self._of(prompts[0]).evaluate(unit, prompts, embeddings)

    def preview(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> Previewed:
        return self._of(prompt).preview(unit, prompt, embedding)

    def _of(self, prompt: Prompt) -> Sampler:
        return self._samplers[shape_of(prompt, self._shapes, self._run_seed)]


def _columns(scores: Tensor) -> dict[str, Any]:
    """The output of a `Scorer` as the fields of `Scores`."""
    rewards, *components = scores.T.tolist()
    return {"rewards": tuple(rewards), "components": tuple(zip(*components, strict=True))}


def group_of(result: UnitResult, sampled: Sampled) -> SampleGroup:
    """A unit's samples as a training group."""
    unit = result.unit
    return SampleGroup(
        iteration=unit.iteration,
        revision=unit.revision,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        **result.columns,
        latents=sampled.latents.cpu(),
        shape=sampled.shape,
        trajectory=sampled.trajectory,
        seconds=result.seconds,
        worker=result.worker,
    )
