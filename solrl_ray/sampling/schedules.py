"""Sigma grids: the noise levels at which a solver evaluates the velocity, from 1 (noise) to 0 (image)."""

from __future__ import annotations

import math

import torch

from solrl_ray.config.schema import SigmaSchedule

_TRAINING_STEPS = 1000
"""Steps of SD3's training grid, whose last noise level ends the sampling grid."""


def sigmas(schedule: SigmaSchedule, steps: int, image_tokens: int) -> torch.Tensor:
    """The grid of `steps` solver steps: float64 [steps + 1], falling from 1 to exactly 0.

    `image_tokens`: image tokens of the transformer; the shifts of ``flux`` and ``flux2`` depend on it.

    Sources: `FlowMatchEulerDiscreteScheduler` of diffusers, with its static shift (SD3, arXiv 2403.03206), its dynamic
    exponential shift (FLUX), and that one stretched to `shift_terminal` (Qwen-Image); `UniPCMultistepScheduler` with
    `use_flow_sigmas` (Wan), to which DPM-Solver's (SANA-Video) is within 0.01; `compute_empirical_mu` of
    diffusers' FLUX.2 pipelines; Sol-RL (arXiv 2604.06916) runs SANA on the plain linear grid.
    """
    if schedule.kind == "linear":
        return _linspace(1.0, 0.0, steps + 1)
    if schedule.kind == "shift":
        # The scheduler shifts the ends of its training grid, spaces the steps evenly between them, and shifts the
        # result again; published models are sampled that way.
        smallest = _shift(torch.tensor(1.0 / _TRAINING_STEPS, dtype=torch.float64), schedule.shift)
        grid = _shift(_linspace(1.0, smallest.item(), steps), schedule.shift)
    elif schedule.kind == "flow_shift":
        grid = _shift(_linspace(1.0, 1.0 / _TRAINING_STEPS, steps + 1)[:-1], schedule.shift)
    else:
        grid = _shift(_linspace(1.0, 1.0 / steps, steps), math.exp(_mu(schedule, steps, image_tokens)))
        if schedule.terminal is not None and steps > 1:  # a single step is 1, with nothing to stretch
            grid = 1.0 - (1.0 - grid) * ((1.0 - schedule.terminal) / (1.0 - grid[-1]))
    return torch.cat([grid, grid.new_zeros(1)])


def _mu(schedule: SigmaSchedule, steps: int, image_tokens: int) -> float:
    """The log of the shift, linear in the number of image tokens; ``flux2``: between its lines for 10 and 200 steps."""
    if schedule.kind == "flux":
        slope = (schedule.max_shift - schedule.base_shift) / (schedule.max_tokens - schedule.base_tokens)
        return schedule.base_shift + slope * (image_tokens - schedule.base_tokens)
    at_200 = 0.00016927 * image_tokens + 0.45666666
    at_10 = 8.73809524e-05 * image_tokens + 1.89833333
    return at_200 if image_tokens > 4300 else at_200 + (at_200 - at_10) / 190 * (steps - 200)


def _shift(sigma: torch.Tensor, shift: float) -> torch.Tensor:
    """Moves noise levels between 0 and 1 towards 1."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def _linspace(start: float, end: float, count: int) -> torch.Tensor:
    """`count` evenly spaced values. Written out: torch.linspace may change its rounding between versions."""
    values = [start + (end - start) * (i / max(count - 1, 1)) for i in range(count)]
    return torch.tensor(values, dtype=torch.float64)
