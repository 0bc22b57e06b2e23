"""Where the randomness of a stochastic trajectory is addressed (design law 2)."""

from __future__ import annotations

from solrl_ray.config.samplers import Ode, SamplerConfig, Stochastic
from solrl_ray.records import Address
from solrl_ray.sampling.noise import uniform


def initial_address(sampler: SamplerConfig, *, run_seed: int, iteration: int, prompt_id: str, index: int) -> Address:
    """Initial noise of a candidate: without its index if the prompt's candidates share it."""
    shared = not isinstance(sampler, Ode) and sampler.shared_noise
    return Address(
        run_seed=run_seed,
        purpose="initial-noise",
        iteration=iteration,
        prompt_id=prompt_id,
        index=0 if shared else index,
    )


def increment_address(*, run_seed: int, iteration: int, prompt_id: str, index: int, step: int) -> Address:
    """Noise of a candidate in step `step` of the full schedule."""
    return Address(
        run_seed=run_seed, purpose="sde-increment", iteration=iteration, prompt_id=prompt_id, index=index, step=step
    )


def window_start(sampler: Stochastic, *, run_seed: int, iteration: int, prompt_id: str) -> int:
    """First step with noise, the same for all candidates of a prompt; 0 without a window."""
    if sampler.window is None:
        return 0
    low, high = sampler.window.range
    address = Address(run_seed=run_seed, purpose="sde-window", iteration=iteration, prompt_id=prompt_id)
    return low + int(uniform(address, (1,))[0] * (high - sampler.window.size - low + 1))
