"""Objectives: losses and advantages. Each one's section in `config.objectives` names its class in this package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from solrl_ray.config.schema import Config
from solrl_ray.objectives.base import Objective


def load(config: Config, grid: Tensor) -> Objective[Any, Any]:
    """The configured objective.

    `grid`: noise levels of the full schedule, float64 [steps + 1] (`sampling.schedules`).
    """
    module, _, name = config.objective.implementation.partition(":")
    objective: type[Objective[Any, Any]] = getattr(import_module(f"{__name__}.{module}"), name)
    return objective(config.objective, grid=grid, sampler=config.rollout.sampler, run_seed=config.run.seed)
