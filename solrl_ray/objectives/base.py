"""The learner's interface to an objective: the velocities to compute, the points to compute them at, and the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from solrl_ray.config.objectives import ObjectiveSection
from solrl_ray.config.samplers import Ode, SamplerConfig
from solrl_ray.records import Address, SampleShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples of one forward. Every field has one entry per sample."""

    prompt_ids: tuple[str, ...]
    """The prompt of each sample."""
    indices: tuple[int, ...]
    """Candidate index of each sample in its prompt's pool."""
    x0: Tensor
    """Clean latents, float32 [B, *latent_shape], on the CPU."""
    weights: Tensor
    """float32 [B]: 1 for a sample, 0 for a repetition that only fills up the batch."""
    shape: SampleShape | None = None
    """Shape of the samples; None if the run has only one."""
    states: Tensor | None = None
    """Stored trajectories, float32 [B, transitions + 1, *latent_shape], on the CPU."""
    first_steps: tuple[int, ...] = ()
    """Step of the full schedule at which each trajectory begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Inputs of one pass over a micro-batch. Each sample has its own noise level."""

    x_t: Tensor
    """float32 [B, *latent_shape]."""
    t: Tensor
    """Noise level, float32 [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Velocities:
    """Velocities of one pass, all [B, *latent_shape]; only `theta` carries a gradient."""

    theta: Tensor
    """Velocity of the trained policy."""
    old: Tensor
    """Velocity of the sampling policy."""
    base: Tensor | None = None
    """Velocity of the model without adapters; None unless the section's `references` name it."""
    anchor: Tensor | None = None
    """Velocity of the third adapter, `anchor`; None unless the section's `references` name it."""

    def __post_init__(self) -> None:
        """Raises ValueError if a shape or dtype differs from theta's: PyTorch would broadcast it silently."""
        if self.theta.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"velocity theta must be float32 or float64, got {self.theta.dtype}")
        for name in ("old", "base", "anchor"):
            v = getattr(self, name)
            if v is not None and (v.dtype, v.shape) != (self.theta.dtype, self.theta.shape):
                theta = f"{self.theta.dtype} {list(self.theta.shape)}"
                raise ValueError(f"velocity {name} is {v.dtype} {list(v.shape)}, theta's is {theta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One value per sample: every field is [B]. The mean of `total` over samples and passes is minimised."""

    total: Tensor
    """The loss that is minimised."""
    policy: Tensor
    """`total` without the KL and anchor terms."""
    kl: Tensor
    """Divergence from the reference, before weighting; zeros without a reference."""
    ratio: Tensor | None = None
    """p_theta / p_old, trained over sampling policy; None if the objective has no ratio."""
    clipped: Tensor | None = None
    """1 where the ratio, or the velocity, is outside the clip range, else 0; None without a clip range."""


C = TypeVar("C", bound=ObjectiveSection)
P = TypeVar("P", bound=Pass)
ODE = Ode()


class Objective(ABC, Generic[C, P]):
    """A loss on regenerated samples. The learner runs the passes, and before them the forwards without gradient."""

    def __init__(self, config: C, *, grid: Tensor, run_seed: int, sampler: SamplerConfig = ODE) -> None:
        """
        Args:
            config: the objective's section.
            grid: noise levels of the full schedule, float64 [steps + 1], falling to 0, on the CPU.
            sampler: the sampler of the samples.
        """
        self._config, self._grid, self._run_seed, self._sampler = config, grid, run_seed, sampler

    @abstractmethod
    def passes(self, batch: MicroBatch, device: torch.device, iteration: int, epoch: int = 0) -> Sequence[P]:
        """The passes over a micro-batch; their number is given by the section's `passes`.

        `epoch`: number of earlier trainings on these samples in this iteration; each epoch has separate draws.
        """

    @abstractmethod
    def loss(self, one: P, v: Velocities, advantages: Tensor) -> Loss:
        """The loss of each sample in one pass.

        Args:
            one: one of `passes`.
            v: velocities of this pass.
            advantages: float64 [B], unclipped, on the device of the velocities.
        """


def of_epoch(purpose: str, epoch: int) -> str:
    """The purpose of addresses in the learner's epoch number `epoch` (from 0) over an iteration's samples."""
    return f"{purpose}/{epoch}" if epoch else purpose


def timestep_addresses(batch: MicroBatch, *, run_seed: int, iteration: int, epoch: int = 0) -> list[Address]:
    """The address from which each sample draws its trained timesteps."""
    purpose = of_epoch("timesteps", epoch)
    return [
        Address(run_seed=run_seed, purpose=purpose, iteration=iteration, prompt_id=prompt_id, index=index)
        for prompt_id, index in zip(batch.prompt_ids, batch.indices, strict=True)
    ]


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped loss of each sample, max(-A rho, -A clip(rho, 1 ± clip_range)); also rho, and whether it is outside.

    Args:
        log_ratio: log rho = log p_theta - log p_old, [batch]; gradient passes through it.
        advantages: A, [batch].

    Returns:
        (loss, rho, outside), each [batch] with log_ratio's dtype; `outside` is 0 or 1. The last two have no gradient.

    Source: proximal policy optimisation (arXiv 1707.06347), equation 7.
    """
    ratio = torch.exp(log_ratio)
    advantages = advantages.to(ratio.dtype)
    bounded = ratio.clamp(1 - clip_range, 1 + clip_range)
    outside = (ratio.detach() != bounded.detach()).to(ratio.dtype)
    return torch.maximum(-advantages * ratio, -advantages * bounded), ratio.detach(), outside


def mean(x: Tensor) -> Tensor:
    """Mean over all dimensions except the first."""
    return x.flatten(1).mean(dim=1)
