"""The DiffusionNFT objective (arXiv 2509.16117): learning from good and bad samples on the forward process.

Rectified flow: x_t = (1 - t) x0 + t eps, velocity v = eps - x0, hence the estimate x0 = x_t - t v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST_WEIGHT = 1e-5
"""Floor of the adaptive weights, in units of the latent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NftLoss:
    """The objective, one value per sample: every field is [batch], in the dtype of v_theta."""

    total: torch.Tensor
    """policy + kl weight * kl. Its mean over samples and timesteps is what is minimised."""
    policy: torch.Tensor
    kl: torch.Tensor
    """Unweighted MSE(v_theta, v_ref); zeros without v_ref."""
    optimality: torch.Tensor
    """r: probability in [0, 1] with which the sample counts as good; 1/2 at advantage 0."""
    positive: torch.Tensor
    """L+: weighted error of the implicit positive policy."""
    negative: torch.Tensor
    """L-: weighted error of the implicit negative policy."""


def noised(x0: torch.Tensor, eps: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """x_t = (1 - t) x0 + t eps for x0, eps [batch, *latent_shape] and t [batch]; dtype of x0."""
    t = _per_sample(t.to(x0.dtype), x0)
    return (1 - t) * x0 + t * eps


def diffusion_nft_loss(
    *,
    v_theta: torch.Tensor,
    v_old: torch.Tensor,
    v_ref: torch.Tensor | None,
    x0: torch.Tensor,
    x_t: torch.Tensor,
    t: torch.Tensor,
    advantages: torch.Tensor,
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
    t = _per_sample(t.to(v_theta.dtype), v_theta)
    v_plus = beta * v_theta + (1 - beta) * v_old
    v_minus = (1 + beta) * v_old - beta * v_theta
    positive = _weighted_error(x_t - t * v_plus, x0)
    negative = _weighted_error(x_t - t * v_minus, x0)
    policy = (adv_clip / beta) * (r * positive + (1 - r) * negative)
    divergence = torch.zeros_like(policy) if v_ref is None else _mean(torch.square(v_theta - v_ref.detach()))
    return NftLoss(
        total=policy + kl * divergence,
        policy=policy,
        kl=divergence,
        optimality=r,
        positive=positive,
        negative=negative,
    )


def _weighted_error(x0_hat: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
    """L per sample. Divided by w, its gradient keeps its size however small the error is."""
    error = x0_hat - x0
    with torch.no_grad():
        weight = _mean(error.double().abs()).clamp(min=SMALLEST_WEIGHT).to(error.dtype)
    return _mean(torch.square(error)) / weight


def _mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over all dimensions but the first."""
    return x.flatten(1).mean(dim=1)


def _per_sample(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[batch] reshaped to broadcast over a [batch, …] tensor."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _check(v_theta: torch.Tensor, latents: dict[str, torch.Tensor | None], scalars: dict[str, torch.Tensor]) -> None:
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
