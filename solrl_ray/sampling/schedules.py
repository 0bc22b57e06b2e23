"""Sigma grids: the noise levels at which a solver evaluates the velocity, from 1 (noise) to 0 (image)."""

from __future__ import annotations

import math

import torch

from solrl_ray.config.schema import SigmaSchedule

_TRAINING_STEPS = 1000
"""Steps of SD3's training grid. Its smallest noise level is the last one of a sampling grid before 0."""


def sigmas(schedule: SigmaSchedule, steps: int, image_tokens: int) -> torch.Tensor:
    """The grid of `steps` solver steps: float64 [steps + 1], falling from 1 to exactly 0.

    `image_tokens`: number of image tokens in the transformer; the shifts of ``flux`` and ``flux2`` depend on it.

    Sources:

    - ``shift``: static shift of diffusers' `FlowMatchEulerDiscreteScheduler` (SD3, arXiv 2403.03206).
    - ``flux``: dynamic exponential shift of the same scheduler (FLUX), also stretched to `shift_terminal` (Qwen-Image).
    - ``flux2``: `compute_empirical_mu` of diffusers' FLUX.2 pipelines.
    - ``flow_shift``: `UniPCMultistepScheduler` with `use_flow_sigmas` (Wan). The grid of DPM-Solver's scheduler
      (SANA-Video) differs from it by less than 0.01.
    - ``linear``: Sol-RL (arXiv 2604.06916) runs SANA on this grid.
    """
    if schedule.kind == "linear":
        return _linspace(1.0, 0.0, steps + 1)
    if schedule.kind == "shift":
        # The scheduler shifts the ends of its training grid, spaces the steps evenly between them, and shifts the
        # result again. Published models are sampled on such a grid.
        smallest = _shift(torch.tensor(1.0 / _TRAINING_STEPS, dtype=torch.float64), schedule.shift)
        grid = _shift(_linspace(1.0, smallest.item(), steps), schedule.shift)
    elif schedule.kind == "flow_shift":
        grid = _shift(_linspace(1.0, 1.0 / _TRAINING_STEPS, steps + 1)[:-1], schedule.shift)
    else:
        grid = _shift(_linspace(1.0, 1.0 / steps, steps), math.exp(_mu(schedule, steps, image_tokens)))
        if schedule.terminal is not None and steps > 1:  # the grid of a single step is just 1, with nothing to stretch
            grid = 1.0 - (1.0 - grid) * ((1.0 - schedule.terminal) / (1.0 - grid[-1]))
    return torch.cat([grid, grid.new_zeros(1)])


def _mu(schedule: SigmaSchedule, steps: int, image_tokens: int) -> float:
    """Log of the shift, linear in the number of image tokens; ``flux2`` interpolates the lines of 10 and 200 steps."""
    if schedule.kind == "flux":
        slope = (schedule.max_shift - schedule.base_shift) / (schedule.max_tokens - schedule.base_tokens)
        return schedule.base_shift + slope * (image_tokens - schedule.base_tokens)
    at_200 = 0.00016927 * image_tokens + 0.45666666
    at_10 = 8.73809524e-05 * image_tokens + 1.89833333
    return at_200 if image_tokens > 4300 else at_200 + (at_200 - at_10) / 190 * (steps - 200)


def _shift(sigma: torch.Tensor, shift: float) -> torch.Tensor:
    """Moves noise levels in [0, 1] towards 1 (for a shift above 1)."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def _linspace(start: float, end: float, count: int) -> torch.Tensor:
    """`count` evenly spaced values. Not torch.linspace, whose rounding may change between versions."""
    values = [start + (end - start) * (i / max(count - 1, 1)) for i in range(count)]
    return torch.tensor(values, dtype=torch.float64)
