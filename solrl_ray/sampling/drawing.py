"""Settings with which a run draws samples by integrating the ODE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from solrl_ray.config.schema import Config, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """`steps` steps of `solver`, at the noise levels of the model's schedule."""

    model: Model
    """Size, guidance, text length and noise levels."""
    steps: int
    solver: Literal["euler", "dpm2"]

    @classmethod
    def of(cls, config: Config, steps: int | None = None) -> Self:
        """The settings of a run's evaluations. `steps`: number of steps, if another stage is drawn."""
        return cls(model=config.evaluated_model, steps=steps or config.evaluation.steps, solver=config.rollout.solver)
