"""A pool of small real actors: who compiles, and who is sent what."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.actor_factory import Actor
from solrl_ray.config.deadlines import Deadlines
from solrl_ray.records import Attestation, Receipt, Refusal, WorkUnit
from solrl_ray.weight_sync.manifest import is_factor
from solrl_ray.weight_sync.payload import read
from tests.chaos.pools import Explored, Slow, Worker, opened, revision, run, spawn, units

pytestmark = pytest.mark.usefixtures("local_ray")


# Who compiles


class Warms(Worker):
    """Compiles for two shapes, the second time when the file is there."""

    GO = Path()

    def start(self) -> Attestation:
        return dataclasses.replace(super().start(), warm_ups=2)

    def warm_up(self, shape: int, probe: str) -> None:
        deadline = time.monotonic() + 60.0
        while shape == 1 and not Path(probe).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("early", [False, True], ids=["", "started before there is a revision"])
def test_who_compiles_shows_how_far_it_is_and_loads_a_revision_after_that(early: bool, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(Warms) as stage:
            stage.pool.resize(1)
            if early:
                await stage.until(lambda: stage.of("started"))
                assert stage.pool.warmed() == (0, 2)
            batch = stage.ask(units(1))
            stage.publish(revision(0), probe=str(tmp_path / "go"))
            await stage.until(lambda: stage.pool.warmed() == (1, 2))
            assert stage.words() == {"explorer-0": "warming up 2 of 2 shapes"}
            assert stage.pool.census()["starting"] == 1
            assert not stage.of("loaded")
            (tmp_path / "go").touch()
            await stage.until(lambda: batch.answers)
            assert stage.of("loaded") == [("explorer-0", 0)]
            assert stage.pool.warmed() == (2, 2)

    run(test)


def test_a_warm_up_has_a_deadline_of_its_own_and_a_renewed_pool_starts_anew_at_no_cost(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(Warms, replacements=1, deadlines=Deadlines(warm_up=2.0)) as stage:
            stage.pool.resize(1)
            stage.publish(revision(0), probe=str(tmp_path / "never"))
            await stage.until(lambda: stage.of("lost"))
            late = "warm-up passed its deadline of 2 s"
            assert stage.of("lost") == [("explorer-0", late, "explorer-0.1", 0)]
            stage.pool.renew()
            await stage.until(lambda: list(stage.words()) == ["explorer-0.2"])
            await stage.until(lambda: ("explorer-0.2",) in stage.of("started"))
            assert len(stage.of("lost")) == 1
            assert not stage.of("loaded"), "before the renewed pool is sent a revision"

    run(test)


# Who is sent what


class SaysWhatCame(Worker):
    """Says of each revision whether it was packed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sent: list[tuple[int, bool]] = []

    def load_revision(self, content: Any, probe: Any, full: bool) -> Receipt | Refusal:
        received = read(content)
        self._sent.append((received.manifest.revision, any(not is_factor(name) for name in received.tensors)))
        return super().load_revision(content, probe, full)

    def sent(self) -> list[tuple[int, bool]]:
        return self._sent


def test_who_has_no_card_waits_for_a_packed_revision_and_who_has_one_takes_factors_of_any() -> None:
    def spawned(name: str) -> Actor:
        return spawn(name, kind=SaysWhatCame, card="card-0" if name == "explorer-0" else "")

    async def test() -> None:
        async with opened(spawned) as stage:
            stage.pool.resize(2)
            stage.publish(revision(1, pack=False))
            await stage.until(lambda: len(stage.of("started")) == 2 and stage.ready() == 1)
            await asyncio.sleep(0.3)
            assert stage.of("loaded") == [("explorer-0", 1)]
            stage.publish(revision(2))
            await stage.until(lambda: stage.ready() == 2)
            handles = [worker.actor.handle for worker in stage.pool.workers.values()]
            assert [await handle.sent.remote() for handle in handles] == [[(1, False), (2, False)], [(2, True)]]
            assert not stage.of("lost")

    run(test)


class Keeps(Slow):
    """Says which revision it holds when it does a unit."""

    def load_revision(self, content: Any, probe: Any, full: bool) -> Receipt | Refusal:
        self._revision = read(content).manifest.revision
        return super().load_revision(content, probe, full)

    def explore(self, unit: WorkUnit, gate: Path) -> Explored:  # type: ignore[override]
        return dataclasses.replace(super().explore(unit, gate), worker=f"{self._name} with {self._revision}")


def test_what_is_published_while_a_unit_is_at_work_is_loaded_after_it_and_before_units_of_its_own(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with opened(Keeps, max_inflight=2) as stage:
            await stage.holding(1)
            gate = tmp_path / "gate"
            (old,) = units(1)
            batch = stage.ask([old], gate)
            await stage.until(lambda: stage.words() == {"explorer-0": "explore p0"})
            stage.publish(revision(1))
            new = dataclasses.replace(old, revision=1, iteration=1)
            waits = [dataclasses.replace(each, prompt_id="late") for each in (old, new)]
            later = stage.ask(waits, gate)
            await asyncio.sleep(0.5)
            assert not stage.of("answered")
            gate.touch()
            await stage.until(lambda: len(later.answers) == 1)
            assert batch.values == {old.id: "explorer-0 with 0"}
            assert later.values == {waits[1].id: "explorer-0 with 1"}, "nobody holds revision 0 any more"
            assert stage.of("loaded") == [("explorer-0", 0), ("explorer-0", 1)]

    run(test)
