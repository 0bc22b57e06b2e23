"""The DiffusionNFT objective (arXiv 2509.16117): learns from good and bad samples on the forward process.

Rectified flow: x_t = (1 - t) x0 + t eps, velocity v = eps - x0, hence the estimate x0 = x_t - t v.
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
    """DiffusionNFT with adaptive weights, as released; the paper's form has w = 1 and no factor C / beta.

        v+ = beta v_theta + (1 - beta) v_old        L± = mean (x_t - t v± - x0)² / w±
        v- = (1 + beta) v_old - beta v_theta        w± = max(mean |x_t - t v± - x0|, 1e-5)
        r = clip(A, ±C) / 2C + 1/2                  policy = C / beta (r L+ + (1 - r) L-)

    r is the probability that a sample counts as good, and kl is MSE(v_theta, v_base). Everything is computed in
    v_theta's dtype, except r and the adaptive weights: these are computed in float64 without gradient and rounded once,
    so that the loss and its backward stay in float32.
    """

    def loss(self, one: NoisedPass, v: Velocities, advantages: Tensor) -> Loss:
        beta, clip = self._config.beta, self._config.advantage.clip
        dtype, old = v.theta.dtype, v.old.detach()
        r = (advantages.double().clamp(-clip, clip) / (2 * clip) + 0.5).to(dtype)
        t = per_sample(one.t.to(dtype), v.theta)
        positive = _weighted_error(one.x_t - t * (beta * v.theta + (1 - beta) * old), one.x0)
        negative = _weighted_error(one.x_t - t * ((1 + beta) * old - beta * v.theta), one.x0)
        policy = (clip / beta) * (r * positive + (1 - r) * negative)
        kl = torch.zeros_like(policy) if v.base is None else mean(torch.square(v.theta - v.base.detach()))
        return Loss(total=policy + self._config.kl * kl, policy=policy, kl=kl)


def _weighted_error(x0_hat: Tensor, x0: Tensor) -> Tensor:
    """L per sample. Divided by w, its gradient keeps its size however small the error is."""
    error = x0_hat - x0
    with torch.no_grad():
        weight = mean(error.double().abs()).clamp(min=SMALLEST_WEIGHT).to(error.dtype)
    return mean(torch.square(error)) / weight
