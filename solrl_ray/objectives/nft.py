"""The DiffusionNFT objective (arXiv 2509.16117): learns from good and bad samples on the forward process.

Rectified flow: x_t = (1 - t) x0 + t eps with velocity v = eps - x0; hence x0 is estimated as x_t - t v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from solrl_ray.config.objectives import DiffusionNftConfig
from solrl_ray.objectives.base import Loss, Velocities, mean
from solrl_ray.objectives.forward_process import ForwardProcess, NoisedPass
from solrl_ray.sampling.sde import per_sample

SMALLEST_WEIGHT = 1e-5
"""Floor of the adaptive weights, in units of the latent."""


class DiffusionNft(ForwardProcess[DiffusionNftConfig]):
    """DiffusionNFT with adaptive weights, as released. The paper's form has w = 1 and no factor C / beta.

    ::

        v+ = beta v_theta + (1 - beta) v_old        L± = mean (x_t - t v± - x0)² / w±
        v- = (1 + beta) v_old - beta v_theta        w± = max(mean |x_t - t v± - x0|, 1e-5)
        r = clip(A, ±C) / 2C + 1/2                  policy = C / beta (r L+ + (1 - r) L-)

    r is the probability that a sample counts as good; kl is MSE(v_theta, v_base). Everything is computed in v_theta's
    dtype, except r and the adaptive weights. These are computed in float64 without gradient and rounded once, so the
    loss and its backward stay in float32.

    With `clip_range`, policy is max(policy(v_theta), policy(v_near)), as in proximal policy optimisation. v_near is the
    point nearest to v_theta in a ball around v_old. The ball's radius is `clip_range` times the distance from v_old to
    eps - x0.
    """

    def loss(self, one: NoisedPass, v: Velocities, advantages: Tensor) -> Loss:
        old, limit, clipped = v.old.detach(), self._config.clip_range, None
        policy = self._policy(one, v.theta, old, advantages)
        if limit is not None:
            near, clipped = nearest_in_ball(v.theta, old, limit * _norm(old - (one.eps - one.x0)))
            bounded = self._policy(one, near, old, advantages)
            # Not `maximum`: where both are equal, it splits the gradient between them.
            policy = torch.where(bounded > policy, bounded, policy)
        kl = torch.zeros_like(policy) if v.base is None else mean(torch.square(v.theta - v.base.detach()))
        return Loss(total=policy + self._config.kl * kl, policy=policy, kl=kl, clipped=clipped)

    def _policy(self, one: NoisedPass, theta: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        beta, clip = self._config.beta, self._config.advantage.clip
        r = (advantages.double().clamp(-clip, clip) / (2 * clip) + 0.5).to(theta.dtype)
        t = per_sample(one.t.to(theta.dtype), theta)
        positive = _weighted_error(one.x_t - t * (beta * theta + (1 - beta) * old), one.x0)
        negative = _weighted_error(one.x_t - t * ((1 + beta) * old - beta * theta), one.x0)
        return (clip / beta) * (r * positive + (1 - r) * negative)


def nearest_in_ball(v: Tensor, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """The point of a ball that is nearest to v; also 1 where v is outside of the ball, else 0, [batch], no gradient.

    For v inside the ball, the point is v, bit for bit. For v outside, moving v away from the centre does not move the
    point, so a loss on it has no gradient in this direction.

    Args:
        v: [batch, *latent_shape].
        centre: [batch, *latent_shape].
        radius: as root mean square over the elements of a sample, [batch].
    """
    away = v - centre
    outside = _norm(away.detach()) > radius
    # Inside the ball replaced by 1: at 0 the root has no finite slope.
    squared = torch.where(outside, mean(torch.square(away)), torch.ones_like(radius))
    shrunk = centre + away * per_sample(radius * torch.rsqrt(squared), v)
    return torch.where(per_sample(outside, v), shrunk, v), outside.to(v.dtype)


def _norm(x: Tensor) -> Tensor:
    """Root mean square of each sample, [batch]."""
    return mean(torch.square(x)).sqrt()


def _weighted_error(x0_hat: Tensor, x0: Tensor) -> Tensor:
    """L per sample. The division by w keeps the gradient's size, however small the error is."""
    error = x0_hat - x0
    with torch.no_grad():
        weight = mean(error.double().abs()).clamp(min=SMALLEST_WEIGHT).to(error.dtype)
    return mean(torch.square(error)) / weight
