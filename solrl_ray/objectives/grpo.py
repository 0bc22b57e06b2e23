"""GRPO objectives on stored transitions: they raise the probability of the steps of good samples.

A transition is one step x_t → x_next of the stochastic sampler, stored in float32 when the sample was regenerated. Its
log-probabilities under the trained and the sampling policy are computed by the same code, so their ratio is exactly 1
before the first update.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solrl_ray.config.objectives import DanceGrpoConfig, FlowGrpoConfig
from solrl_ray.config.samplers import Ode, SamplerConfig
from solrl_ray.objectives.base import (
    Loss,
    MicroBatch,
    Objective,
    Pass,
    Velocities,
    clipped_surrogate,
    mean,
    timestep_addresses,
)
from solrl_ray.records import Address
from solrl_ray.sampling import sde
from solrl_ray.sampling.noise import permutation
from solrl_ray.sampling.sde import Coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionPass(Pass):
    x_next: Tensor
    """The state after x_t, float32 [B, *latent_shape]."""
    coefficients: Coefficients


G = TypeVar("G", bound=FlowGrpoConfig | DanceGrpoConfig)


class Grpo(Objective[G, TransitionPass]):
    """The clipped surrogate on the ratios of transitions, plus their divergence from the reference."""

    def __init__(self, config: G, *, grid: Tensor, run_seed: int, sampler: SamplerConfig) -> None:
        """Raises ValueError for a sampler without transitions."""
        super().__init__(config, grid=grid, run_seed=run_seed, sampler=sampler)
        if isinstance(sampler, Ode):
            raise ValueError(f"objective {config.kind} needs a stochastic sampler")
        self._levels: list[float] = grid.tolist()
        steps = len(self._levels) - 1
        self._trained = config.trained(sampler.recorded(steps))
        self._transitions = [sde.transition(sampler, self._levels, step) for step in range(steps - 1)]

    @abstractmethod
    def chosen(self, address: Address) -> NDArray[np.int64]:
        """Positions of a sample's trained transitions among its stored ones, in the order of training."""

    def passes(self, batch: MicroBatch, device: torch.device, iteration: int, epoch: int = 0) -> list[TransitionPass]:
        if batch.states is None:
            raise ValueError(f"{self._config.kind} needs the trajectories of its samples; these have none")
        addresses = timestep_addresses(batch, run_seed=self._run_seed, iteration=iteration, epoch=epoch)
        rows = torch.arange(len(addresses))
        passes = []
        for column in np.stack([self.chosen(address) for address in addresses]).T:
            steps = [first + int(k) for first, k in zip(batch.first_steps, column, strict=True)]
            positions = torch.from_numpy(column)
            x_t, x_next = batch.states[rows, positions].to(device), batch.states[rows, positions + 1].to(device)
            transitions = [self._transitions[step] for step in steps]
            passes.append(
                TransitionPass(
                    x_t=x_t,
                    t=torch.tensor([self._levels[step] for step in steps], dtype=x_t.dtype, device=device),
                    x_next=x_next,
                    coefficients=Coefficients.of(transitions, device, x_t.dtype),
                )
            )
        return passes

    def loss(self, one: TransitionPass, v: Velocities, advantages: Tensor) -> Loss:
        config, coefficients = self._config, one.coefficients
        theta, old = (sde.mean(coefficients, one.x_t, x) for x in (v.theta, v.old))
        log_theta, log_old = (sde.log_probability(coefficients, one.x_next, x) for x in (theta, old))
        clipped_advantages = advantages.clamp(-config.advantage.clip, config.advantage.clip)
        policy, ratio, clipped = clipped_surrogate(log_theta - log_old.detach(), clipped_advantages, config.clip_range)
        kl = torch.zeros_like(policy)
        if v.base is not None:
            base = sde.mean(coefficients, one.x_t, v.base).detach()
            kl = coefficients.kl_weight * mean(torch.square(theta - base))
        return Loss(total=policy + config.kl * kl, policy=policy, kl=kl, ratio=ratio, clipped=clipped)


class FlowGrpo(Grpo[FlowGrpoConfig]):
    """Flow-GRPO (arXiv 2505.05470): every stored transition of `step_range`, in the order of the trajectory."""

    def chosen(self, address: Address) -> NDArray[np.int64]:
        return np.array(self._trained)


class DanceGrpo(Grpo[DanceGrpoConfig]):
    """DanceGRPO (arXiv 2505.07818): trains a random subset of each sample's transitions, drawn by a permutation."""

    def chosen(self, address: Address) -> NDArray[np.int64]:
        count = len(self._trained)
        return self._trained.start + permutation(address, count)[: self._config.passes(0, count)]
