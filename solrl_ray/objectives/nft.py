"""The DiffusionNFT objective (arXiv 2509.16117): learning from good and bad samples on the forward process.

Rectified flow: x_t = (1 - t) x0 + t eps, velocity v = eps - x0, hence the estimate x0 = x_t - t v.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solrl_ray.config.objectives import DiffusionNftConfig
from solrl_ray.objectives.base import Loss, Velocities, mean, per_sample
from solrl_ray.objectives.forward_process import ForwardProcess, NoisedPass
from solrl_ray.objectives.timesteps import timesteps_for

SMALLEST_WEIGHT = 1e-5
"""Floor of the adaptive weights, in units of the latent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NftLoss(Loss):
    """The objective, one value per sample, in the dtype of v_theta. `kl` is MSE(v_theta, v_ref)."""

    optimality: Tensor
    """r: probability in [0, 1] with which the sample counts as good; 1/2 at advantage 0."""
    positive: Tensor
    """L+: weighted error of the implicit positive policy."""
    negative: Tensor
    """L-: weighted error of the implicit negative policy."""


class DiffusionNft(ForwardProcess):
    """The objective on samples; see `diffusion_nft_loss`."""

    def __init__(self, config: DiffusionNftConfig, *, grid: Tensor, run_seed: int) -> None:
        super().__init__(grid=grid, run_seed=run_seed)
        self._config = config
        self.references = ("base",) if config.kl != 0 else ()

    def steps(self, iteration: int, prompt_id: str, index: int) -> NDArray[np.int64]:
        return timesteps_for(
            run_seed=self._run_seed,
            iteration=iteration,
            prompt_id=prompt_id,
            index=index,
            steps=len(self._grid),
            fraction=self._config.timestep_fraction,
        )

    def loss(self, one: NoisedPass, v: Velocities, advantages: Tensor) -> NftLoss:
        return diffusion_nft_loss(
            v_theta=v.theta,
            v_old=v.old,
            v_ref=v.base,
            x0=one.x0,
            x_t=one.x_t,
            t=one.t,
            advantages=advantages,
            beta=self._config.beta,
            kl=self._config.kl,
            adv_clip=self._config.advantage.clip,
        )


def diffusion_nft_loss(
    *,
    v_theta: Tensor,
    v_old: Tensor,
    v_ref: Tensor | None,
    x0: Tensor,
    x_t: Tensor,
    t: Tensor,
    advantages: Tensor,
    beta: float,
    kl: float,
    adv_clip: float,
) -> NftLoss:
    """DiffusionNFT with adaptive weights, as released; the paper's form has w = 1 and no factor C / beta.

        v+ = beta v_theta + (1 - beta) v_old        L± = mean (x_t - t v± - x0)² / w±
        v- = (1 + beta) v_old - beta v_theta        w± = max(mean |x_t - t v± - x0|, 1e-5)
        r = clip(A, ±C) / 2C + 1/2                  policy = C / beta (r L+ + (1 - r) L-)

    Everything is computed in v_theta's dtype, except r and the adaptive weights: these are worked out in
    float64 without gradient and rounded once, so that the loss and its backward stay in float32.

    Args:
        v_theta: velocity of the trained policy, float32 or float64 [batch, *latent_shape].
        v_old: velocity of the sampling policy; no gradient passes through it.
        v_ref: velocity of the reference policy (adapters off), likewise; may be None if `kl` is 0.
        x0: clean latents, regenerated in full precision.
        x_t: `noised(x0, eps, t)`.
        t: noise levels in (0, 1], [batch].
        advantages: A, [batch], clipped here.
        beta: mixing coefficient of the implicit policies, above 0.
        kl: weight of MSE(v_theta, v_ref).
        adv_clip: C, the largest |A| that counts.

    Raises:
        ValueError: shapes or dtypes that do not fit, beta or adv_clip not above 0, or `kl` without `v_ref`.
    """
    _check(v_theta, {"v_old": v_old, "v_ref": v_ref, "x0": x0, "x_t": x_t}, {"t": t, "advantages": advantages})
    if not (beta > 0 and adv_clip > 0):
        raise ValueError(f"beta and adv_clip must be above 0, got {beta} and {adv_clip}")
    if kl != 0 and v_ref is None:
        raise ValueError(f"kl is {kl}, which needs v_ref")
    v_old = v_old.detach()
    r = (advantages.double().clamp(-adv_clip, adv_clip) / (2 * adv_clip) + 0.5).to(v_theta.dtype)
    t = per_sample(t.to(v_theta.dtype), v_theta)
    v_plus = beta * v_theta + (1 - beta) * v_old
    v_minus = (1 + beta) * v_old - beta * v_theta
    positive = _weighted_error(x_t - t * v_plus, x0)
    negative = _weighted_error(x_t - t * v_minus, x0)
    policy = (adv_clip / beta) * (r * positive + (1 - r) * negative)
    divergence = torch.zeros_like(policy) if v_ref is None else mean(torch.square(v_theta - v_ref.detach()))
    return NftLoss(
        total=policy + kl * divergence,
        policy=policy,
        kl=divergence,
        optimality=r,
        positive=positive,
        negative=negative,
    )


def _weighted_error(x0_hat: Tensor, x0: Tensor) -> Tensor:
    """L per sample. Divided by w, its gradient keeps its size however small the error is."""
    error = x0_hat - x0
    with torch.no_grad():
        weight = mean(error.double().abs()).clamp(min=SMALLEST_WEIGHT).to(error.dtype)
    return mean(torch.square(error)) / weight


def _check(v_theta: Tensor, latents: dict[str, Tensor | None], scalars: dict[str, Tensor]) -> None:
    if v_theta.dtype not in (torch.float32, torch.float64) or v_theta.ndim < 2:
        raise ValueError(
            f"v_theta must be float32 or float64 [batch, *latent_shape], got {v_theta.dtype} {list(v_theta.shape)}"
        )
    for name, tensor in latents.items():
        if tensor is not None and (tensor.shape != v_theta.shape or tensor.dtype != v_theta.dtype):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, v_theta is {v_theta.dtype} {list(v_theta.shape)}"
            )
    for name, tensor in scalars.items():
        if tensor.shape != v_theta.shape[:1]:
            raise ValueError(f"{name} must be [{v_theta.shape[0]}], got {list(tensor.shape)}")
