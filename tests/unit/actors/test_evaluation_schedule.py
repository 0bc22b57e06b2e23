"""Evaluations on the way go on beside an update; with one process a card, before the next iteration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from actors.evaluation.schedule import EvaluationSchedule
from solrl_ray.config.loading import load
from tests.support.small import CONFIGS

ON_CARDS = "fleet.placement=colocated"
WARM = "run.init=somewhere"


class Run:
    """What a schedule needs of a run; keeps what was evaluated, while the regenerators held which policy."""

    def __init__(self, *overrides: str, evaluated: tuple[tuple[str, int], ...] = ()) -> None:
        config = load([CONFIGS / "demo.yaml"], ["run.iterations=9", "evaluation={every: 3, reference: ''}", *overrides])
        self.evaluations = [SimpleNamespace(policy=policy, iteration=updates) for policy, updates in evaluated]
        self.found: list[tuple[str, int, str, bool]] = []
        """Policy, updates, what the regenerators held, whether learners were at work meanwhile."""
        self._held, self._updates = "the run's", 0.0
        this: Any = self
        self.schedule = EvaluationSchedule(config, (), this, this, this, this)

    async def of(self, prompts: Any, guidance_of: Any) -> dict[str, Any]:
        return {}

    async def policy(self, policy: str) -> tuple[str, float]:
        return policy, self._updates

    @asynccontextmanager
    async def evaluating(self, publication: tuple[str, float]) -> AsyncIterator[None]:
        self._held = f"{publication[0]} of {publication[1]}"
        yield
        self._held = "the run's"

    async def run(self, policy: str, updates: int, *_: Any, holder: str = "", overlaps: bool = False) -> None:
        assert holder in ("", policy)
        self.found.append((policy, updates, self._held, overlaps))
        self.evaluations.append(SimpleNamespace(policy=policy, iteration=updates))

    async def iterate(self, first: int = 0) -> None:
        """As the controller does."""
        schedule = self.schedule
        self._updates = first
        await schedule.before_training() if first == 0 else await schedule.before_iteration(first)
        for updates in range(first, 9):
            self._updates = updates + 0.5  # the update has begun
            await schedule.beside_update()
            self._updates = updates + 1
            held_up, begun = schedule.holds_up(updates + 1), len(self.found)
            assert await schedule.before_iteration(updates + 1) == held_up == (len(self.found) > begun)
        await schedule.evaluate_ema(9)


def evaluated(run: Run, first: int = 0) -> list[tuple[str, int, str, bool]]:
    asyncio.run(run.iterate(first))
    return run.found


BASE, LAST = ("base", 0, "the run's", False), ("ema", 9, "ema of 9", False)


@pytest.mark.parametrize(
    ("overrides", "on_the_way"),
    [
        ((), [("ema", 3, "ema of 3", True), ("ema", 6, "ema of 6", True)]),
        ((ON_CARDS,), [("ema", 3, "ema of 3", False), ("ema", 6, "ema of 6", False)]),
        (("evaluation.every=0",), []),
    ],
)
def test_who_evaluates_on_the_way_and_when(
    overrides: tuple[str, ...], on_the_way: list[tuple[str, int, str, bool]]
) -> None:
    assert evaluated(Run(*overrides)) == [BASE, *on_the_way, LAST]


def test_a_resumed_run_evaluates_what_is_missing_once() -> None:
    assert evaluated(Run(evaluated=(("base", 0),)), first=6) == [("ema", 6, "ema of 6", True), LAST]
    there = (("base", 0), ("ema", 3))
    assert evaluated(Run(evaluated=there), first=3) == [("ema", 6, "ema of 6", True), LAST]
    assert evaluated(Run(evaluated=(*there, ("ema", 9))), first=7) == []


def test_a_run_that_begins_with_factors_measures_the_base_and_what_it_begins_with() -> None:
    found = evaluated(Run(WARM, "evaluation.every=0"))
    assert found == [("base", 0, "base of 0", False), ("ema", 0, "ema of 0", False), LAST]


def test_real_pictures_are_scored_first_and_once() -> None:
    run = Run("evaluation={reference: 'a.module:pictures', every: 0}")
    assert evaluated(run)[0] == ("real", 0, "the run's", False)
    assert evaluated(Run("evaluation={reference: 'a.module:pictures', every: 0}", evaluated=(("real", 0),)))[0] == BASE
