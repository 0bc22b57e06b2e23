"""Deterministic ODE solvers (Euler, DPM-Solver++) for rectified flow.

Convention: x_sigma = (1 - sigma) x0 + sigma · noise, velocity v = noise - x0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch

Velocity: TypeAlias = Callable[[torch.Tensor, float], torch.Tensor]
"""(latents, sigma) → velocity, with the latents' shape and dtype."""


Solver: TypeAlias = Literal["euler", "dpm2"]


@dataclass(frozen=True, slots=True)
class SolverState:
    """State of an integration. Rows (the first dimension) are independent: any of them can continue alone or in another
    batch.
    """

    latents: torch.Tensor
    """[batch, *latent_shape]."""
    x0: torch.Tensor | None = None
    """Estimate of the clean latents from the last step, x - sigma v; None before the first step."""

    def rows(self, indices: torch.Tensor) -> SolverState:
        """The state of these rows, in this order."""
        return SolverState(self.latents[indices], None if self.x0 is None else self.x0[indices])


def together(states: Sequence[SolverState]) -> SolverState:
    """Concatenate the rows of several states, each of which has taken at least one step."""
    return SolverState(torch.cat([s.latents for s in states]), torch.cat([s.x0 for s in states if s.x0 is not None]))


def advance(
    velocity: Velocity,
    state: SolverState,
    sigmas: torch.Tensor,
    solver: Solver,
    *,
    first: int = 0,
    end: int | None = None,
) -> SolverState:
    """Integrates `state` along the velocity field from sigma 1 (noise) to 0, with one evaluation per step.

    With `first` and `end`, only the steps ``first … end - 1`` are taken.

    Args:
        velocity: called with the latents and their sigma.
        state: its latents are [batch, *latent_shape], float32 (float64 for reference runs).
        sigmas: float64 [steps + 1], strictly falling, the last one 0 (`schedules.sigmas`).
        solver: ``euler``, or ``dpm2`` for DPM-Solver++(2M) in x0 form.

    Raises:
        ValueError: the solver is unknown, the latents are not float32 or float64, the sigmas do not fall to 0, or a
            velocity has another shape or dtype than the latents.
    """
    if solver not in _STEPS:
        raise ValueError(f"solver is {solver!r}; choose 'euler' or 'dpm2'")
    if state.latents.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"solvers take latents in float32 or float64, not {state.latents.dtype}")
    # Python floats, so that coefficients are computed in float64 whatever the state's dtype.
    grid: list[float] = sigmas.tolist()
    if len(grid) < 2 or grid[-1] != 0.0 or any(a <= b for a, b in pairwise(grid)):
        raise ValueError(f"sigmas must fall strictly and end in 0, but are {grid}")
    for step in range(first, len(grid) - 1 if end is None else end):
        latents, sigma = state.latents, grid[step]
        v = velocity(latents, sigma)
        if v.shape != latents.shape or v.dtype != latents.dtype:
            raise ValueError(
                f"velocity at sigma {sigma} is {v.dtype} {list(v.shape)}, "
                f"but the latents are {latents.dtype} {list(latents.shape)}"
            )
        state = _STEPS[solver](state, v, grid, step)
    return state


def _euler(state: SolverState, v: torch.Tensor, sigmas: list[float], step: int) -> SolverState:
    sigma, sigma_next = sigmas[step : step + 2]
    return SolverState(state.latents + (sigma_next - sigma) * v, state.latents - sigma * v)


def _dpm2(state: SolverState, v: torch.Tensor, sigmas: list[float], step: int) -> SolverState:
    """DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2) for alpha = 1 - sigma.

    The paper's step is z <- (sigma_next / sigma) z - alpha_next (e^-h - 1) D. It simplifies, because here
    alpha_next (1 - e^-h) = 1 - sigma_next / sigma. A first-order step (D = x0) then equals Euler's.
    """
    sigma, sigma_next = sigmas[step : step + 2]
    x0 = state.latents - sigma * v
    weight = _second_order_weight(sigmas, step)
    denoised = x0 if state.x0 is None or weight == 0.0 else x0 + weight * (x0 - state.x0)
    ratio = sigma_next / sigma
    return SolverState(ratio * state.latents + (1.0 - ratio) * denoised, x0)


def _second_order_weight(sigmas: list[float], step: int) -> float:
    """Weight of x0 - x0_before: 1 / (2 r0), with r0 = h_before / h and h the step in log signal-to-noise ratio.

    The weight is 0 in the first step, which has no predecessor, and in the last step, where h is infinite. It is also 0
    in the second step: h_before is infinite, because sigma was 1.
    """
    if step == 0 or step == len(sigmas) - 2:
        return 0.0
    before, now, after = (_log_snr(sigma) for sigma in sigmas[step - 1 : step + 2])
    return (after - now) / (2.0 * (now - before))


def _log_snr(sigma: float) -> float:
    """Log signal-to-noise ratio, lambda = ln(alpha / sigma), with alpha = 1 - sigma."""
    return -math.inf if sigma == 1.0 else math.log(1.0 - sigma) - math.log(sigma)


_STEPS = {"euler": _euler, "dpm2": _dpm2}
