"""Deterministic ODE solvers for rectified flow: x_sigma = (1 - sigma) x0 + sigma noise, v = noise - x0."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, TypeAlias

import torch

Velocity: TypeAlias = Callable[[torch.Tensor, float], torch.Tensor]
"""(latents, sigma) → velocity, of the latents' shape and dtype."""


def integrate(
    velocity: Velocity, noise: torch.Tensor, sigmas: torch.Tensor, solver: Literal["euler", "dpm2"]
) -> torch.Tensor:
    """Carries `noise` along the velocity field from sigma 1 to 0, with one evaluation a step.

    Args:
        velocity: called with the latents and the sigma at which they are.
        noise: [batch, *latent_shape] float32; it is the dtype of the state (float64 for reference runs).
        sigmas: float64 [steps + 1], falling, last one 0 (`schedules.sigmas`).
        solver: ``euler``, or ``dpm2``: DPM-Solver++(2M) in x0 form.

    Returns:
        The clean latents x0, shape and dtype of `noise`.

    Raises:
        ValueError: unknown solver, a state that is not float32 or float64, sigmas that do not fall to 0, or a
            velocity of another shape or dtype than the latents.
    """
    if solver not in ("euler", "dpm2"):
        raise ValueError(f"solver is {solver!r}; known are 'euler' and 'dpm2'")
    if noise.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the solver's state is float32 or float64, not {noise.dtype}")
    # Python floats: the coefficients are worked out in float64, whatever the state is held in.
    grid: list[float] = sigmas.tolist()
    if len(grid) < 2 or grid[-1] != 0.0 or any(a <= b for a, b in pairwise(grid)):
        raise ValueError(f"sigmas must fall strictly and end in 0, got {grid}")

    def checked(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        v = velocity(latents, sigma)
        if v.shape != latents.shape or v.dtype != latents.dtype:
            raise ValueError(
                f"velocity at sigma {sigma} is {v.dtype} {list(v.shape)}, "
                f"the latents are {latents.dtype} {list(latents.shape)}"
            )
        return v

    return _euler(checked, noise, grid) if solver == "euler" else _dpm2(checked, noise, grid)


def _euler(velocity: Velocity, latents: torch.Tensor, sigmas: list[float]) -> torch.Tensor:
    for sigma, sigma_next in pairwise(sigmas):
        latents = latents + (sigma_next - sigma) * velocity(latents, sigma)
    return latents


def _dpm2(velocity: Velocity, latents: torch.Tensor, sigmas: list[float]) -> torch.Tensor:
    """DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2) for alpha = 1 - sigma.

    The paper's step z <- (sigma_next / sigma) z - alpha_next (e^-h - 1) D simplifies, because here
    alpha_next (1 - e^-h) = 1 - sigma_next / sigma; a first-order step (D = x0) then equals Euler's.
    """
    x0_before: torch.Tensor | None = None
    for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        x0 = latents - sigma * velocity(latents, sigma)
        weight = _second_order_weight(sigmas, step)
        denoised = x0 if x0_before is None or weight == 0.0 else x0 + weight * (x0 - x0_before)
        ratio = sigma_next / sigma
        latents = ratio * latents + (1.0 - ratio) * denoised
        x0_before = x0
    return latents


def _second_order_weight(sigmas: list[float], step: int) -> float:
    """Weight 1 / (2 r0) of x0 - x0_before, where r0 = h_before / h and h is a step in log signal-to-noise.

    It is 0 in the first step, which has none before it, and in the last, where h is infinite. In the second
    step h_before is infinite, as sigma was 1, so that one is first-order as well.
    """
    if step == 0 or step == len(sigmas) - 2:
        return 0.0
    before, here, after = (_log_snr(sigma) for sigma in sigmas[step - 1 : step + 2])
    return (after - here) / (2.0 * (here - before))


def _log_snr(sigma: float) -> float:
    """lambda = ln(alpha / sigma) with alpha = 1 - sigma."""
    return -math.inf if sigma == 1.0 else math.log(1.0 - sigma) - math.log(sigma)
