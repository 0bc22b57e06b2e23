"""The selector is killed, or hangs, in chosen states; a new one goes on from its journal, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.dispatch.selector_client import SelectorClient
from actors.fleet.actor_factory import ActorClasses, ActorFactory
from actors.ray_world import RayWorld
from actors.workers.selector import Ack, Selector
from actors.world import Tasks
from solrl_ray.records import SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationSummary, group_digest
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.scheduling.worker_state import Replacements
from solrl_ray.storage.run_folder import RunFolder
from tests.support.patience import SECONDS
from tests.support.selecting import PLAN, group_of, ids, result
from tests.support.small import small_config

pytestmark = pytest.mark.usefixtures("local_ray")

AHEAD = replace(PLAN, iteration=5, revision=5, staleness=1)


class Line:
    """A client, and what the controller would know by it."""

    def __init__(self, folder: Path, tasks: Tasks, player: type[Selector], replacements: int = 4) -> None:
        config = small_config(folder, "run")
        self.world = RayWorld(ActorFactory(config, folder, ActorClasses(selector=player)))
        self.said: list[str] = []
        self.client = SelectorClient(
            self.world,
            tasks,
            seconds=SECONDS,
            replacements=Replacements(replacements),
            tell=lambda text, kind="note": self.said.append(text),
        )

    def bring(self, brought: UnitResult) -> asyncio.Future[Ack]:
        return asyncio.ensure_future(self.client.accept(brought))

    def bring_group(self, group: Any, iteration: int = 4) -> asyncio.Future[Ack]:
        return asyncio.ensure_future(self.client.accept_group(iteration, group))

    async def wanted(self, iteration: int = 4) -> list[str]:
        return ids(await self.client.wanted(iteration))


def lost_object() -> Any:
    """A reference of what went down with whoever was to make it."""

    class Maker:
        def make(self) -> None: ...

    maker: Any = ray.remote(Maker).options(num_cpus=0).remote()
    ray.kill(maker)
    return maker.make.remote()


def die_once(folder: Path, name: str) -> None:
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Stuck(RunFolder):
    """Its disk takes no group before the selector was killed for the last time."""

    def save_group(self, group: SampleGroup) -> None:
        while not (self.path / "closing").exists():
            time.sleep(0.1)
        super().save_group(group)


class Killed(Selector):
    """Once after it journaled a result, once before it takes a result, once after it took a group, and once when it has
    taken all of them and written none."""

    def __init__(self, folder: Path, strict: bool) -> None:
        super().__init__(folder, strict)
        self._folder = Stuck(folder)

    def close(self, iteration: int) -> IterationSummary:
        die_once(self._folder.path, "closing")
        return super().close(iteration)

    def record(self, result: UnitResult) -> Ack:
        if result.unit.prompt_id == "cafe":
            die_once(self._folder.path, "before")
        ack = super().record(result)
        die_once(self._folder.path, "recorded")
        return ack

    def record_group(self, group: SampleGroup) -> Outcome:
        outcome = super().record_group(group)
        die_once(self._folder.path, "taken")
        return outcome


def test_what_a_killed_selector_did_not_acknowledge_is_sent_again_and_counts_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Tasks() as tasks:
            line = Line(tmp_path, tasks, Killed)
            opened = await line.client.open(PLAN)
            assert opened.results == ()
            ahead = (await line.client.open(AHEAD)).units
            assert ids(ahead) == ids(AHEAD.pool_units())
            assert await line.bring(result(opened.units[0])) == Ack()
            assert await line.wanted() == ids(opened.units[1:])  # it was journaled, and not acknowledged
            regenerate: list[WorkUnit] = []
            for unit in opened.units[1:]:
                ack = await line.bring(result(unit))
                regenerate += [ack.chosen] if ack.chosen is not None else []
            assert [(unit.prompt_id, unit.indices) for unit in regenerate] == [("beef", (1, 0)), ("cafe", (3, 1))]
            groups = [ray.put(group_of(unit)) for unit in regenerate]
            assert await line.bring_group(groups[0]) == Ack()
            assert await line.bring_group(groups[1]) == Ack()
            summary = await line.client.close(4)
            assert len(line.said) == 4
            assert [tuple(c.index for c in selection.chosen) for selection in summary.selections] == [(1, 0), (3, 1)]
            assert summary.proxy_mean == pytest.approx(0.5)
            assert (summary.counts.candidates, summary.counts.groups, summary.counts.violations) == (8, 2, 0)
            rewards, group = await line.client.stored(4, "cafe")
            assert rewards == group_of(regenerate[1]).rewards
            assert group_digest(await group) == group_digest(group_of(regenerate[1]))
            # Each time both iterations were gone on with, and the younger one's units are wanted as before.
            assert await line.wanted(5) == ids(ahead)
            assert await line.wanted() == []

    asyncio.run(scenario())


class Hangs(Selector):
    """Once, when it is brought a result."""

    def accept(self, results: Sequence[UnitResult]) -> list[Ack]:
        try:
            (self._folder.path / "hung").touch(exist_ok=False)
        except FileExistsError:
            return super().accept(results)
        time.sleep(3600.0)
        return []


def test_a_selector_that_hangs_is_restarted_and_brought_the_same_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Tasks() as tasks:
            line = Line(tmp_path, tasks, Hangs, replacements=1)

            def tell(sentence: str, kind: str = "note") -> None:
                line.said.append(sentence)
                line.client._seconds = SECONDS

            line.client._report = tell
            first, second, *_ = (await line.client.open(PLAN)).units
            line.client._seconds = 1.0  # it has started: a start takes longer
            acknowledged = [line.bring(result(each)) for each in (second, first)]
            chosen = (await acknowledged[1]).chosen
            assert chosen is not None
            assert chosen.id == "regenerate/4/beef/1-0"
            assert await acknowledged[0] == Ack()
            late = "the selector's answer to accept failed: no answer within its deadline of 1 s"
            assert line.said == [f"the selector is restarted and replays its journal ({late})"]

    asyncio.run(scenario())


class Unwritten(Selector):
    """Its disk takes no group before the file ``closing`` is there."""

    def __init__(self, folder: Path, strict: bool) -> None:
        super().__init__(folder, strict)
        self._folder = Stuck(folder)


def test_a_group_that_neither_disk_nor_object_store_holds_is_wanted_again_of_a_new_selector(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Tasks() as tasks:
            line = Line(tmp_path, tasks, Unwritten)
            units = (await line.client.open(PLAN)).units
            acks = await asyncio.gather(*[line.bring(result(unit)) for unit in units])
            of_beef, of_cafe = [ack.chosen for ack in acks if ack.chosen is not None]
            for unit in (of_beef, of_cafe):
                assert await line.bring_group(ray.put(group_of(unit))) == Ack()
            # The selector dies before it writes, and one of the groups is on a node that goes at the same time.
            ray.kill(line.client._actor.handle)
            line.client._groups[4][0] = lost_object()
            (tmp_path / "closing").touch()
            assert (await line.client.stored(4, "cafe"))[0] == group_of(of_cafe).rewards
            assert await line.wanted() == [of_beef.id]
            assert await line.bring_group(ray.put(group_of(of_beef))) == Ack()
            assert (await line.client.close(4)).counts.groups == 2

    asyncio.run(scenario())
