"""Evaluations on the way go on beside an update, but not where learners take turns with regenerators on a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest

from actors.evaluation.schedule import EvaluationSchedule
from solrl_ray.config.loading import load
from tests.support.small import CONFIGS

SHARED = "fleet={regenerators: {num_gpus: 0.5}, learners: {num_gpus: 0.5}}"


def held_out(*overrides: str, evaluated: tuple[int, ...] = ()) -> EvaluationSchedule:
    config = load([CONFIGS / "demo.yaml"], ["run.iterations=9", "evaluation.every=3", *overrides])
    found = [SimpleNamespace(policy="ema", iteration=updates) for updates in evaluated]
    unused: Any = None
    return EvaluationSchedule(config, (), unused, unused, unused, SimpleNamespace(evaluations=found))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "evaluated", "beside", "before"),
    [
        ((), (), [3, 6], []),
        ((SHARED,), (), [], [3, 6]),
        ((), (3,), [6], []),
        (("evaluation.every=0",), (), [], []),
    ],
)
def test_who_evaluates_on_the_way_and_when(
    overrides: tuple[str, ...], evaluated: tuple[int, ...], beside: list[int], before: list[int]
) -> None:
    this = held_out(*overrides, evaluated=evaluated)
    updates = range(1, 10)
    assert [n for n in updates if this.goes_beside(n)] == beside
    assert [n for n in updates if this.comes_before(n)] == before
