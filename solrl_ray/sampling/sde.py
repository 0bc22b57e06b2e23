"""Stochastic samplers for rectified flow, and the log-probabilities of their steps.

Each step of the published samplers is Gaussian. Its mean is linear in state and velocity:

    x_next ~ N(x_weight · x + v_weight · v, std²)

So a step is described by a few numbers, computed in float64; states are float32. With dt = sigma_next - sigma < 0:

========= =================================================== =====================
sampler   mean                                                std
========= =================================================== =====================
flow_sde  x + v dt + s²/(2 sigma) (x + (1 - sigma) v) dt      s sqrt(-dt)
dance_sde the same with s = eta                               s sqrt(-dt)
cps       (1 - sigma_next) x0 + sqrt(sigma_next² - std²) x1   sigma_next sin(a pi/2)
Euler     x + v dt                                            0
========= =================================================== =====================

with s = a sqrt(sigma / (1 - sigma)) for flow_sde, x0 = x - sigma v, and x1 = x + (1 - sigma) v.

Sources: Flow-GRPO (arXiv 2505.05470), DanceGRPO (arXiv 2505.07818), CPS (arXiv 2509.05952), with their released code.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from solrl_ray.config.samplers import Cps, DanceSde, FlowSde, Stochastic
from solrl_ray.sampling.solvers import SolverState, Velocity


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Distribution of one step. A log-probability is a mean over the elements of a latent, not a sum: published clip
    ranges are in that unit.
    """

    x_weight: float
    v_weight: float
    std: float
    """Standard deviation; 0 for an Euler step, which has no density."""
    precision: float = 0.0
    """log p = log_normalizer - precision · average((x_next - mean)²) over the elements of a latent."""
    log_normalizer: float = 0.0
    kl_weight: float = 0.0
    """Weight of average((mean_theta - mean_reference)²) in the KL term. 1 / (2 s²) as in the released code of
    Flow-GRPO, which leaves out dt.
    """


def euler(sigma: float, sigma_next: float) -> Transition:
    """The deterministic step along the ODE."""
    return Transition(x_weight=1.0, v_weight=sigma_next - sigma, std=0.0)


def sde(sigma: float, sigma_next: float, s: float, noisy: float | None = None) -> Transition:
    """Euler-Maruyama step with noise scale `s` > 0.

    `noisy`: length of the stochastic part of the step from `sigma` down to `sigma_next` (default: all of it). The
    remaining length follows the ODE.
    """
    dt = sigma_next - sigma
    noisy = -dt if noisy is None else noisy
    std = s * math.sqrt(noisy)
    drift = s**2 / (2 * sigma) * -noisy
    return Transition(
        x_weight=1 + drift,
        v_weight=dt + drift * (1 - sigma),
        std=std,
        precision=1 / (2 * std**2),
        log_normalizer=-math.log(std) - 0.5 * math.log(2 * math.pi),
        kl_weight=1 / (2 * s**2),
    )


def cps(sigma: float, sigma_next: float, noise_level: float) -> Transition:
    """Coefficient-preserving step: the total noise in x_next has standard deviation sigma_next.

    The released log-probability has no variance and no constants, so probability ratios have another scale than those
    of `sde`. With sigma_next 0 the step is Euler's.
    """
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    if std == 0:
        return euler(sigma, sigma_next)
    kept = math.sqrt(sigma_next**2 - std**2)
    return Transition(
        x_weight=1 - sigma_next + kept,
        v_weight=-sigma * (1 - sigma_next) + kept * (1 - sigma),
        std=std,
        precision=1.0,
        kl_weight=1 / (2 * std**2),
    )


def transition(sampler: Stochastic, grid: Sequence[float], step: int, noisy: float | None = None) -> Transition:
    """The stochastic step ``grid[step] → grid[step + 1]`` of `sampler`; `noisy` as for `sde`.

    At sigma 1 the scale of Flow-SDE is infinite. As in the released code, it is computed from the next sigma of the
    grid instead.
    """
    sigma, sigma_next = grid[step], grid[step + 1]
    if isinstance(sampler, Cps):
        return cps(sigma, sigma_next, sampler.noise_level)
    if isinstance(sampler, DanceSde):
        return sde(sigma, sigma_next, sampler.eta, noisy)
    below_one = sigma_next if sigma == 1.0 else sigma
    return sde(sigma, sigma_next, sampler.noise_level * math.sqrt(sigma / (1 - below_one)), noisy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverStep:
    """One step of a trajectory, and the normals that make up its noise."""

    sigma: float
    transition: Transition
    increments: tuple[tuple[int, float], ...]
    """(step of the full schedule, weight) of each standard normal; their weighted sum is the noise of this step."""


def nested(full: int, steps: int) -> list[int]:
    """`steps` + 1 of the grid points 0 … `full`, including both ends, spaced as evenly as integers allow."""
    return [(2 * j * full + steps) // (2 * steps) for j in range(steps + 1)]


def plan(sampler: Stochastic, grid: Sequence[float], steps: int, start: int = 0) -> list[SolverStep]:
    """Plan a trajectory of `steps` steps that follows the same Brownian path as the full schedule.

    A longer step covers several steps of the full schedule. Its noise is the sum of their increments sqrt(dt_i) z_i,
    which is again a standard normal times the square root of the stochastic length. So a preview follows the path of
    the full trajectory, up to its discretisation error.

    Args:
        grid: sigmas of the full schedule, [full + 1], from 1 to 0.
        start: first step of the sampler's window, if it has one.
    """
    full = len(grid) - 1
    noisy = range(full if isinstance(sampler, FlowSde) else full - 1)
    if sampler.window is not None:
        noisy = range(start, start + sampler.window.size)
    points = nested(full, steps)
    coarse = [grid[point] for point in points]
    planned = []
    for k, (first, end) in enumerate(pairwise(points)):
        lengths = {i: grid[i] - grid[i + 1] for i in range(first, end) if i in noisy}
        # DanceGRPO decodes the x0 estimate of its last step; that equals Euler's step to 0.
        if not lengths or (isinstance(sampler, DanceSde) and k == steps - 1):
            planned.append(SolverStep(sigma=coarse[k], transition=euler(coarse[k], coarse[k + 1]), increments=()))
            continue
        total = coarse[k] - coarse[k + 1] if len(lengths) == end - first else math.fsum(lengths.values())
        single = len(lengths) == 1
        weights = tuple((i, 1.0 if single else math.sqrt(length / total)) for i, length in lengths.items())
        planned.append(
            SolverStep(sigma=coarse[k], transition=transition(sampler, coarse, k, total), increments=weights)
        )
    return planned


def integrate(
    velocity: Velocity,
    state: SolverState,
    steps: Sequence[SolverStep],
    increments: Mapping[int, Tensor],
    *,
    keep: Container[int] = (),
) -> tuple[SolverState, list[Tensor]]:
    """Integrates from `state`, initially noise, along `steps`.

    Args:
        state: its latents are float32 [batch, *latent_shape].
        increments: step of the full schedule → its standard normals, with the latents' shape and device.
        keep: which latents to return as well: 0 for those of `state`, i for those after step i.

    Returns:
        The state after the last step, and the kept latents in step order.
    """
    kept = [state.latents] if 0 in keep else []
    for count, step in enumerate(steps, start=1):
        x, move = state.latents, step.transition
        v = velocity(x, step.sigma)
        after = move.x_weight * x + move.v_weight * v
        for index, weight in step.increments:
            after = after + move.std * weight * increments[index]
        state = SolverState(after, x - step.sigma * v)
        if count in keep:
            kept.append(after)
    return state, kept


def mean(transitions: Coefficients, x: Tensor, v: Tensor) -> Tensor:
    """Mean of x_next, with the shape and dtype of `x`."""
    return per_sample(transitions.x_weight, x) * x + per_sample(transitions.v_weight, x) * v


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Values [batch], reshaped to broadcast over a tensor [batch, …]."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def log_probability(transitions: Coefficients, x_next: Tensor, mean: Tensor) -> Tensor:
    """log p(x_next), averaged over the elements of each latent: [batch]."""
    squared = torch.square(x_next - mean).flatten(1).mean(dim=1)
    return transitions.log_normalizer - transitions.precision * squared


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Transitions of a batch, one per sample. Each field is a tensor [batch], as `Transition`'s field of that name."""

    x_weight: Tensor
    v_weight: Tensor
    precision: Tensor
    log_normalizer: Tensor
    kl_weight: Tensor

    @classmethod
    def of(cls, transitions: Sequence[Transition], device: torch.device, dtype: torch.dtype) -> Coefficients:
        fields = {
            name: torch.tensor([getattr(t, name) for t in transitions], dtype=dtype, device=device)
            for name in cls.__dataclass_fields__
        }
        return cls(**fields)
