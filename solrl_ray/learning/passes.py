"""What the forward passes over one micro-batch see: clean latents noised to addressed noise levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from solrl_ray.learning.batches import MicroBatch
from solrl_ray.noise import initial_noise
from solrl_ray.objectives.nft import noised
from solrl_ray.objectives.timesteps import timesteps_for, training_noise_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One timestep of a micro-batch. The samples stand at different noise levels: each at its own."""

    x_t: torch.Tensor
    """(1 - t) x0 + t eps, float32 [B, *latent_shape]."""
    t: torch.Tensor
    """float32 [B]."""


def passes_over(
    batch: MicroBatch,
    x0: torch.Tensor,
    *,
    grid: torch.Tensor,
    fraction: float,
    run_seed: int,
    iteration: int,
) -> list[Pass]:
    """The passes over one micro-batch; in pass j every sample stands at the j-th step of its own permutation.

    Args:
        x0: the batch's clean latents on the device of the passes.
        grid: noise levels of the full schedule without the final 0, float32 [steps], on the CPU.
        fraction: share of them that each sample is trained on.
    """
    steps = np.stack(
        [
            timesteps_for(
                run_seed=run_seed,
                iteration=iteration,
                prompt_id=prompt_id,
                index=index,
                steps=len(grid),
                fraction=fraction,
            )
            for prompt_id, index in zip(batch.prompt_ids, batch.indices, strict=True)
        ]
    )
    passes = []
    for step in steps.T:
        eps = _noise(batch, step, run_seed, iteration).to(x0.device)
        t = grid[torch.from_numpy(step)].to(x0.device)
        passes.append(Pass(x_t=noised(x0, eps, t), t=t))
    return passes


def _noise(batch: MicroBatch, steps: NDArray[np.int64], run_seed: int, iteration: int) -> torch.Tensor:
    """Training noise of every sample at its schedule step, float32 [B, *latent_shape], on the CPU."""
    addresses = [
        training_noise_address(run_seed=run_seed, iteration=iteration, prompt_id=prompt_id, index=index, step=int(step))
        for prompt_id, index, step in zip(batch.prompt_ids, batch.indices, steps, strict=True)
    ]
    return initial_noise(addresses, tuple(batch.x0.shape[1:]))
