"""Advantage-weighted matching (arXiv 2509.25050): the flow-matching error replaces the log-likelihood.

A sample's clean latent is noised to a level t. l = mean (v - (eps - x0))² measures how badly the policy predicts it. A
decreasing function of l replaces log p in the clipped surrogate, so the objective works with samples of any sampler.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solrl_ray.config.objectives import AwmConfig, share_of
from solrl_ray.objectives.base import Loss, Velocities, clipped_surrogate, mean
from solrl_ray.objectives.forward_process import ForwardProcess, NoisedPass, stratified_steps
from solrl_ray.records import Address

Weighting = Literal["uniform", "huber", "ghuber"]
_FLOOR = 1e-10
"""Added to l, so that its roots have a finite slope at 0."""


class Awm(ForwardProcess[AwmConfig]):
    def steps(self, address: Address) -> NDArray[np.int64]:
        """One step from each slice of the schedule, ascending, as released."""
        config = self._config
        steps = config.trained(len(self._grid) - 1)
        end = steps.start + share_of(len(steps), config.timestep_fraction)
        return stratified_steps(address, first=steps.start + config.skip_first, end=end, count=config.timesteps)

    def loss(self, one: NoisedPass, v: Velocities, advantages: Tensor) -> Loss:
        config = self._config
        target = one.eps - one.x0
        theta, old = (log_likelihood(x, target, one.t, config.weighting, config.power) for x in (v.theta, v.old))
        clip = config.advantage.clip
        scaled = advantages.clamp(-clip, clip) * (config.advantage_max / clip)
        policy, ratio, clipped = clipped_surrogate(theta - old.detach(), scaled, config.clip_range)
        kl, held = (
            torch.zeros_like(policy) if other is None else mean(torch.square(v.theta - other.detach()))
            for other in (v.base, v.anchor)
        )
        total = policy + config.kl * kl + config.anchor.weight * held
        total, policy, kl, ratio = (value.to(v.theta.dtype) for value in (total, policy, kl, ratio))
        return Loss(total=total, policy=policy, kl=kl, ratio=ratio, clipped=clipped)


def log_likelihood(v: Tensor, target: Tensor, t: Tensor, weighting: Weighting, power: float) -> Tensor:
    """The substitute for log p of a sample at one noise level, float64 [batch].

    ``uniform``: -l. ``huber``: -t (sqrt(l + e) - sqrt(e)). ``ghuber``: -(t / p) ((l + e)^p - e^p), which equals huber
    up to a factor at p = 1/2. l = mean (v - target)² and e = 1e-10, in float64 as released.

    Args:
        v: velocity [batch, *latent_shape].
        target: eps - x0, [batch, *latent_shape].
        t: noise level [batch].
        power: p.
    """
    error = mean(torch.square((v - target).double()))
    if weighting == "uniform":
        return -error
    if weighting == "huber":
        return -(torch.sqrt(error + _FLOOR) - _FLOOR**0.5) * t.double()
    return -(t.double() / power) * ((error + _FLOOR) ** power - _FLOOR**power)
