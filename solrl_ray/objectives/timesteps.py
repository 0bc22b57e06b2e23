"""Which noise levels a sample is trained on, and with which noise: both addressed (design law 2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solrl_ray.config.objectives import share_of
from solrl_ray.records import Address
from solrl_ray.sampling import noise


def timestep_count(steps: int, fraction: float) -> int:
    """Timesteps per sample: floor(fraction * steps), at least 1.

    0.4, 0.6 and 0.99 of 10 steps are 4, 6 and 9, as in the published recipes.

    Raises:
        ValueError: `steps` is below 1 or `fraction` outside of (0, 1].
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not 0 < fraction <= 1:
        raise ValueError(f"timestep fraction must lie in (0, 1], got {fraction}")
    return share_of(steps, fraction)


def timesteps_for(
    *, run_seed: int, iteration: int, prompt_id: str, index: int, steps: int, fraction: float
) -> NDArray[np.int64]:
    """Schedule steps on which one sample is trained, in training order: int64 [`timestep_count`].

    They are the front of the sample's own permutation of 0 … steps-1; step k stands for sigma k of the full
    schedule (`sampling.schedules`), so the clean end, sigma 0, never occurs.

    Source: Sol-RL and DiffusionNFT draw timesteps per sample without replacement.
    """
    count = timestep_count(steps, fraction)
    address = Address(run_seed=run_seed, purpose="timesteps", iteration=iteration, prompt_id=prompt_id, index=index)
    return noise.permutation(address, steps)[:count]


def stratified_steps(
    *, run_seed: int, iteration: int, prompt_id: str, index: int, first: int, end: int, count: int
) -> NDArray[np.int64]:
    """One step out of each of `count` equal slices of first … end - 1, rising: int64 [count].

    Source: advantage-weighted matching (arXiv 2509.25050) as released.
    """
    if not 1 <= count <= end - first:
        raise ValueError(f"{count} steps cannot be drawn from {first} … {end - 1}")
    address = Address(run_seed=run_seed, purpose="timesteps", iteration=iteration, prompt_id=prompt_id, index=index)
    inside = noise.uniform(address, (count,))
    drawn = np.floor((np.arange(count) + inside) * ((end - first) / count)).astype(np.int64)
    return first + np.minimum(drawn, end - first - 1)  # what is just below the end may round up to it


def training_noise_address(*, run_seed: int, iteration: int, prompt_id: str, index: int, step: int) -> Address:
    """Names the noise with which a sample's clean latent is noised to the sigma of schedule step `step`."""
    return Address(
        run_seed=run_seed,
        purpose="training-noise",
        iteration=iteration,
        prompt_id=prompt_id,
        index=index,
        step=step,
    )
