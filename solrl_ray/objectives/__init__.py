"""Objectives by `objective.kind`: a new one is a section in `config.objectives`, a class here and a line below."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from solrl_ray.config import objectives as sections
from solrl_ray.config.samplers import Ode
from solrl_ray.config.schema import Config
from solrl_ray.objectives.awm import Awm
from solrl_ray.objectives.base import Objective
from solrl_ray.objectives.grpo import DanceGrpo, FlowGrpo
from solrl_ray.objectives.nft import DiffusionNft


def load(config: Config, grid: Tensor) -> Objective[Any]:
    """The configured objective.

    Args:
        grid: noise levels of the full schedule, float64 [steps + 1] (`sampling.schedules`).

    Raises:
        ValueError: it learns from transitions, which the configured sampler lacks (`config.checks`).
    """
    section, sampler, run_seed = config.objective, config.rollout.sampler, config.run.seed
    levels = grid[:-1].float()
    if isinstance(section, sections.DiffusionNftConfig):
        return DiffusionNft(section, grid=levels, run_seed=run_seed)
    if isinstance(section, sections.AwmConfig):
        return Awm(section, grid=levels, run_seed=run_seed)
    if isinstance(sampler, Ode):
        raise ValueError(f"objective {section.kind} needs a stochastic sampler")
    made = DanceGrpo if isinstance(section, sections.DanceGrpoConfig) else FlowGrpo
    return made(section, sampler, grid=grid, run_seed=run_seed)
