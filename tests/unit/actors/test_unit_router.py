"""Units on their way to workers and back: who is told of what, and what is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from actors.dispatch.unit_router import Answer, Loss, Owner, UnitRouter
from actors.world import Tasks
from solrl_ray.config.fleet import FleetConfig
from solrl_ray.records import WorkUnit
from tests.support.iteration_scene import Watching

HOLDS = "old", 0


class Clock:
    def now(self) -> float:
        return 100.0


class Batch(Owner):
    """Requests one unit, and notes what it is told."""

    def __init__(self, batch: str, pays: bool) -> None:
        self.batch, self._pays = batch, pays
        self.unit = WorkUnit(stage="regenerate", iteration=0, revision=0, prompt_id=batch, indices=(0, 1))
        self.lost_workers: list[str] = []
        self.answers: list[Answer] = []

    def call(self, unit: WorkUnit) -> tuple[str, tuple[Any, ...], int]:
        return "regenerate", (unit,), 1

    async def judge(self, answer: Answer) -> str:
        self.answers.append(answer)
        return answer.worker

    def lost(self, worker: str) -> bool:
        self.lost_workers.append(worker)
        return self._pays


class Hand:
    name, pool, is_alone = "regenerator-0", "regenerators", False

    def give(self, unit: WorkUnit, batch: str, method: str, arguments: tuple[Any, ...], parts: int) -> None: ...


class Value:
    seconds, started = 1.0, 0.0


def lose(*batches: Batch, before: Callable[[UnitRouter], None] = lambda router: None) -> Loss:
    """A worker that has one unit of each batch is lost, after something else."""

    async def test() -> Loss:
        clock: Any = Clock()
        async with Tasks() as tasks:
            router = UnitRouter(clock, tasks, FleetConfig(max_inflight=9), Watching(), lambda name, reason: None)
            router.ready(Hand(), HOLDS)
            for batch in batches:
                router.request(batch, [batch.unit], "regenerators")
            await asyncio.sleep(0)
            assert len(router.units_of("regenerator-0")) == len(batches)
            before(router)
            return router.lost("regenerator-0")

    return asyncio.run(test())


def test_every_owner_of_a_lost_workers_units_is_told_whoever_pays() -> None:
    for pays in ((True, True), (True, False), (False, True)):
        first, second = (Batch(name, each) for name, each in zip(("one", "two"), pays, strict=True))
        assert lose(first, second) == Loss(requeued=2, charged=False)
        assert first.lost_workers == second.lost_workers == ["regenerator-0"]


def test_the_run_pays_for_a_lost_worker_for_which_no_owner_does() -> None:
    assert lose(Batch("one", False), Batch("two", False)) == Loss(requeued=2, charged=True)
    assert lose() == Loss(requeued=0, charged=True)


def test_an_owner_that_has_dropped_its_units_is_told_nothing_more() -> None:
    gone, there = Batch("one", True), Batch("two", False)

    def dropped(router: UnitRouter) -> None:
        (awaited,) = router.request(gone, [gone.unit], "regenerators")
        router.drop(gone)
        assert awaited.cancelled()
        router.answered(Hand(), gone.unit, gone.batch, Value(), None)

    assert lose(gone, there, before=dropped) == Loss(requeued=1, charged=True)
    assert (gone.lost_workers, gone.answers) == ([], [])
