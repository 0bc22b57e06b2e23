"""From a work unit to scored images: what explorers and regenerators share, without Ray.

A unit's indices are addressed noise; solver, decoder and reward follow. The forward's shape is always
`micro_batch`: a short last one repeats its last member, whose surplus results are dropped. So a score is a function
of its unit alone (design law 3). With a stochastic sampler the noise of every step is addressed too, and a preview
takes that of the full trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from solrl_ray.config.samplers import Ode, SamplerConfig, Stochastic
from solrl_ray.config.schema import Config
from solrl_ray.models.base import DiffusionModel
from solrl_ray.records import Address, Prompt, PromptEmbedding, SampleGroup, Trajectory, UnitResult, WorkUnit
from solrl_ray.rewards.base import Reward
from solrl_ray.sampling import sde
from solrl_ray.sampling.noise import initial_noise, uniform
from solrl_ray.sampling.schedules import sigmas
from solrl_ray.sampling.solvers import Velocity, integrate

ODE = Ode()
WARM_UP_SIGMA = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What became of a unit, in the order of the unit's indices."""

    latents: Tensor
    """Clean latents x0, float32 [n, *latent_shape], where they were made: whoever needs them fetches them."""
    images: Tensor
    """float32 [n, 3, H, W] in [0, 1], where they were made."""
    rewards: Tensor
    """float32 [n], on the CPU."""
    trajectory: Trajectory | None = None
    """Of a sampler that records; on the CPU."""
    reward_costs: Mapping[str, int] = field(default_factory=dict)
    """What the rewards cost (`Reward.take_costs`)."""


def addresses(unit: WorkUnit, run_seed: int, sampler: SamplerConfig = ODE) -> list[Address]:
    """Where the initial noise of a unit's samples comes from.

    Explored and regenerated ones share it: that is what makes a regenerated image the previewed one, in full. With
    `shared_noise` all candidates of a prompt do.
    Evaluation noise is the same in every iteration.
    """
    purpose, iteration = ("initial-noise", unit.iteration) if unit.stage != "evaluate" else ("evaluation-noise", 0)
    prompt = Address(run_seed=run_seed, purpose=purpose, iteration=iteration, prompt_id=unit.prompt_id)
    shared = not isinstance(sampler, Ode) and sampler.shared_noise
    return [prompt if shared else replace(prompt, index=index) for index in unit.indices]


def window_start(sampler: SamplerConfig, unit: WorkUnit, run_seed: int) -> int:
    """First step with noise, the same for all candidates of a prompt; 0 without a window."""
    window = None if isinstance(sampler, Ode) else sampler.window
    if window is None:
        return 0
    low, high = window.range
    address = Address(run_seed=run_seed, purpose="sde-window", iteration=unit.iteration, prompt_id=unit.prompt_id)
    return low + int(uniform(address, (1,))[0] * (high - window.size - low + 1))


class Sampler:
    """Samples, decodes and scores units of one stage with one model."""

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
        """`sampler` is `rollout.sampler` unless another is given; `record`: keep the transitions that can be trained
        on, of full trajectories of a stochastic sampler."""
        self._run_seed = config.run.seed
        self._solver = config.rollout.solver
        self._sampler = config.rollout.sampler if sampler is None else sampler
        self._model = model
        self._reward = reward
        self._micro_batch = micro_batch
        self._steps = steps
        self._record = record
        self._schedule = config.model.schedule
        self._regenerate_steps = config.rollout.regenerate.steps
        if record and (isinstance(self._sampler, Ode) or steps != self._regenerate_steps):
            raise ValueError("only full trajectories of a stochastic sampler have transitions to record")

    @torch.no_grad()
    def warm_up(self, embedding: PromptEmbedding) -> None:
        """One forward and one decoding of the shapes that units have, so that what is compiled for them is."""
        batch = self._model.batch_embeddings([embedding] * self._micro_batch)
        where = [Address(run_seed=self._run_seed, purpose="warm-up", index=i) for i in range(self._micro_batch)]
        noise = initial_noise(where, self._model.latent_shape).to(self._model.device)
        self._model.decode(self._model.velocity(noise, WARM_UP_SIGMA, batch))

    # Not inference mode: its tensors lack the version counter by which q, k and v share a quantised input.
    @torch.no_grad()
    def __call__(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> Sampled:
        """Raises RewardError if the reward fails, ValueError if the embedding is of another prompt."""
        if not unit.prompt_id == prompt.id == embedding.prompt_id:
            raise ValueError(f"unit {unit.id} came with prompt {prompt.id} and the embedding of {embedding.prompt_id}")
        batch = self._model.batch_embeddings([embedding] * self._micro_batch)
        parts = [self._one(part, prompt, batch) for part in self._micro_batches(unit)]
        count = len(unit.indices)
        latents, images, rewards, states = (torch.cat(tensors)[:count] for tensors in zip(*parts, strict=True))
        start = window_start(self._sampler, unit, self._run_seed)
        return Sampled(
            latents=latents,
            images=images,
            rewards=rewards,
            trajectory=Trajectory(states=states, first_step=start) if self._record else None,
            reward_costs=self._reward.take_costs(),
        )

    def _micro_batches(self, unit: WorkUnit) -> Iterator[WorkUnit]:
        """The unit in parts of the forward's shape."""
        for start in range(0, len(unit.indices), self._micro_batch):
            part = unit.indices[start : start + self._micro_batch]
            yield replace(unit, indices=part + part[-1:] * (self._micro_batch - len(part)))

    def _one(self, part: WorkUnit, prompt: Prompt, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """(latents, images, rewards, recorded states); the states are empty if none are recorded."""
        noise = initial_noise(addresses(part, self._run_seed, self._sampler), self._model.latent_shape)
        noise = noise.to(self._model.device)

        def velocity(state: Tensor, sigma: float) -> Tensor:
            return self._model.velocity(state, sigma, batch)

        states: Sequence[Tensor] = ()
        if isinstance(self._sampler, Ode):
            latents = integrate(velocity, noise, self._sigmas(part), self._solver)
        else:
            latents, states = self._stochastic(self._sampler, velocity, noise, part)
        images = self._model.decode(latents)
        rewards = self._reward.score(images, [prompt.text] * len(images))
        kept = torch.stack([state.float().cpu() for state in states], dim=1) if states else torch.empty(len(latents), 0)
        return latents.float(), images.float(), rewards.float().cpu(), kept

    def _stochastic(
        self, sampler: Stochastic, velocity: Velocity, noise: Tensor, part: WorkUnit
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Clean latents, and the states before and after each recorded transition."""
        start = window_start(sampler, part, self._run_seed)
        steps = sde.plan(sampler, self._sigmas(part).tolist(), part.steps or self._steps, start)
        increments = {index: self._increment(part, index) for step in steps for index, _ in step.increments}
        recorded = range(start, start + sampler.recorded(self._steps) + 1) if self._record else ()
        return sde.integrate(velocity, noise, steps, increments, keep=recorded)

    def _sigmas(self, part: WorkUnit) -> Tensor:
        """Noise levels. With a stochastic sampler a preview's are part of the full grid, else each has the published
        grid of its steps."""
        steps = (part.steps or self._steps) if isinstance(self._sampler, Ode) else self._regenerate_steps
        return sigmas(self._schedule, steps, self._model.image_tokens)

    def _increment(self, part: WorkUnit, step: int) -> Tensor:
        """Noise of each candidate in step `step` of the full schedule."""
        address = Address(run_seed=self._run_seed, purpose="sde-increment", iteration=part.iteration, step=step)
        where = [replace(address, prompt_id=part.prompt_id, index=index) for index in part.indices]
        return initial_noise(where, self._model.latent_shape).to(self._model.device)


def group_of(result: UnitResult, sampled: Sampled) -> SampleGroup:
    """A unit's samples as they are learned from."""
    unit = result.unit
    return SampleGroup(
        iteration=unit.iteration,
        revision=unit.revision,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        rewards=result.rewards,
        latents=sampled.latents.cpu(),
        trajectory=sampled.trajectory,
        seconds=result.seconds,
        worker=result.worker,
    )
