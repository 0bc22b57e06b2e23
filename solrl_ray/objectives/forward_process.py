"""Objectives on the forward process: clean latents are noised again, to addressed levels with addressed noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solrl_ray.config import objectives as sections
from solrl_ray.objectives.base import MicroBatch, Objective, Pass, of_epoch, timestep_addresses
from solrl_ray.records import Address
from solrl_ray.sampling.noise import initial_noise, permutation, uniform
from solrl_ray.sampling.sde import per_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedPass(Pass):
    """x_t = (1 - t) x0 + t eps."""

    x0: Tensor
    """Clean latents, float32 [B, *latent_shape]."""
    eps: Tensor


def noised(x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) x0 + t eps for x0, eps [batch, *latent_shape] and t [batch]; dtype of x0."""
    t = per_sample(t.to(x0.dtype), x0)
    return (1 - t) * x0 + t * eps


F = TypeVar("F", bound=sections.ForwardProcessSection)


class ForwardProcess(Objective[F, NoisedPass]):
    """Pass j noises each sample to the j-th of its drawn steps of the full schedule."""

    def steps(self, address: Address) -> NDArray[np.int64]:
        """A sample's trained steps of the full schedule, in order. They are addressed draws and never sigma 0.

        Steps are drawn without replacement, as the beginning of a permutation per sample (Sol-RL, DiffusionNFT). With
        `shared_noise`, one step is drawn from each slice.
        """
        steps = self._config.trained(len(self._grid) - 1)
        count = self._config.passes(len(steps), 0)
        if self._config.shared_noise:
            return stratified_steps(address, first=steps.start, end=steps.stop, count=count)
        return steps.start + permutation(address, len(steps))[:count]

    def passes(self, batch: MicroBatch, device: torch.device, iteration: int, epoch: int = 0) -> list[NoisedPass]:
        x0, levels = batch.x0.to(device), self._grid.float()
        addresses = timestep_addresses(batch, run_seed=self._run_seed, iteration=iteration, epoch=epoch)
        if self._config.shared_noise:
            addresses = [replace(address, index=0) for address in addresses]
        passes = []
        for column in np.stack([self.steps(address) for address in addresses]).T:
            where = [
                replace(address, purpose=of_epoch("training-noise", epoch), step=int(step))
                for address, step in zip(addresses, column, strict=True)
            ]
            eps = initial_noise(where, tuple(x0.shape[1:])).to(device)
            t = levels[torch.from_numpy(column)].to(device)
            passes.append(NoisedPass(x_t=noised(x0, eps, t), t=t, x0=x0, eps=eps))
        return passes


def stratified_steps(address: Address, *, first: int, end: int, count: int) -> NDArray[np.int64]:
    """One step from each of `count` slices of first … end - 1, ascending: int64 [count].

    Slice bounds are those of equal slices, rounded down to whole steps as released, so no step is drawn twice. Steps
    1 … 11 in six slices are [1, 2), [2, 4), [4, 6), [6, 8), [8, 10), [10, 12).
    """
    bounds = first + np.arange(count + 1) * (end - first) // count
    inside = np.floor(uniform(address, (count,)) * np.diff(bounds)).astype(np.int64)
    return bounds[:-1] + np.minimum(inside, np.diff(bounds) - 1)  # a value just below a bound may round up to it
