"""Checkpoints of runs that nobody trained."""

from __future__ import annotations

from pathlib import Path

import torch

from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.learning.state import LearnerState, Tensors
from solrl_ray.storage.continuation import FORMAT, FORMAT_FILE
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.storage.warm_start import factor_shapes
from tests.support.small import small_config


def small_state(updates: int) -> LearnerState:
    def one() -> dict[str, torch.Tensor]:
        return {"block.lora_A": torch.full((2, 2), float(updates))}

    return LearnerState(
        updates=updates, steps=updates, default=one(), old=one(), ema=one(), exp_avg=one(), exp_avg_sq=one()
    )


def factors(config: Config, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in factor_shapes(config).items()}


def state(config: Config, updates: int) -> LearnerState:
    default, old, ema, moments = (factors(config, 10 * updates + i) for i in (0, 1, 2, 5))
    return LearnerState(
        updates=updates, steps=updates, default=default, old=old, ema=ema, exp_avg=moments, exp_avg_sq=moments
    )


def checkpointed(root: Path, name: str, *overrides: str) -> Config:
    """The configuration of a run with checkpoints after 1 and 2 updates."""
    config = small_config(root, name, *overrides)
    run = RunFolder.of(config)
    run.path.mkdir(parents=True)
    (run.path / FORMAT_FILE).write_text(str(FORMAT))
    (run.path / "config.yaml").write_text(to_yaml(config))
    for updates in (1, 2):
        state(config, updates).save(run.checkpoint(updates))
    return config
