"""A run of the real system that takes seconds: the shipped testbed, three prompts, three iterations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config

CONFIGS = Path(__file__).parents[2] / "configs"

SIZES = (
    "run.iterations=3",
    "rollout={prompts: 3, pool: 8, keep: 4, solver: dpm2}",
    "rollout.explore={steps: 3, micro_batch: 4, precision: nvfp4-emulated}",
    "rollout.regenerate={steps: 4, micro_batch: 4}",
    "learner.micro_batch=4",
    "objective.timestep_fraction=0.5",
    "evaluation={prompts: 2, samples: 2, steps: 3, pictures: 1}",
    "fleet={explorers: {count: 1}, regenerators: {count: 1}, learners: {threads: 1}}",
)


def small_config(root: Path, name: str, *overrides: str) -> Config:
    """The demo's configuration, made small. `overrides` as for ``--set``."""
    return load([CONFIGS / "demo.yaml"], [*SIZES, f"run.root='{root}'", f"run.name={name}", *overrides])


def summary(config: Config) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(folder(config).joinpath("summary.json").read_text())
    return content


def digests(config: Config) -> tuple[str, str]:
    """(selection digest, LoRA digest) of a finished run."""
    found = summary(config)
    return found["selection_digest"], found["lora_digest"]


def folder(config: Config) -> Path:
    return Path(config.run.root) / config.run.name
