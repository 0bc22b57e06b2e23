"""Pools of small real actors: how a failure arrives, and who may work together."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectLostError

from actors import termination
from actors.budget import Budget
from actors.events import Done, Event, Left, Lent, Loaded, Lost, Nonsense, Rested, Started, Unplaced, Warmed
from actors.fleet import Fleet
from actors.places import Places
from actors.pool import Pool
from actors.telemetry import Telemetry
from solrl_ray.config.schema import Deadlines
from solrl_ray.errors import NotFiniteError, RunError, UserError
from solrl_ray.records import Attestation, Receipt, WorkUnit
from solrl_ray.revisions.manifest import Expected
from solrl_ray.run_folder import RunFolder
from tests.small import small_config

Failure = Callable[[], Exception]
"""Makes the error: Ray takes one of its own errors among an actor's arguments for a lost argument."""

pytestmark = pytest.mark.usefixtures("local_ray")


class Worker:
    """Attests the score class it is told; fails in its start if it is told how and replaces nobody."""

    def __init__(self, name: str, score_class: str, failure: Failure | None) -> None:
        self._name = name
        self._score_class = score_class
        self._failure = None if "." in name else failure

    def start(self) -> Attestation:
        if self._failure is not None:
            raise self._failure()
        return Attestation(
            worker=self._name,
            device=f"device {self._score_class}",
            tier="bf16",
            score_class=self._score_class,
            checks={},
        )

    def load_revision(self, full: bool) -> Receipt:
        return Receipt(
            worker=self._name,
            role="explorer",
            revision=0,
            score_class=self._score_class,
            policy="old",
            bound_modules=1,
            buffer_digest="",
            probe_digest="",
        )


def load(handle: Any, full: bool) -> Any:
    return handle.load_revision.remote(full)


def spawn(
    name: str,
    score_class: str = "A",
    failure: Failure | None = None,
    kind: type[Worker] = Worker,
    resources: dict[str, float] | None = None,
) -> Any:
    return ray.remote(kind).options(num_cpus=0, resources=resources).remote(name, score_class, failure)


def pool_of(
    spawned: type[Worker] | Callable[[str], Any],
    *,
    credit: int = 1,
    replacements: int = 0,
    deadlines: Deadlines | None = None,
) -> Pool:
    """A pool of this kind of worker, or of what the function starts; whoever opens a worker names it."""
    start = (lambda name: spawn(name, kind=spawned)) if isinstance(spawned, type) else spawned
    return Pool(
        start, unit_seconds=60.0, credit=credit, deadlines=deadlines or Deadlines(), budget=Budget(replacements)
    )


def opened(failure: Failure) -> Pool:
    pool = pool_of(lambda name: spawn(name, failure=failure), replacements=1)
    pool.open("explorer-0")
    return pool


def settle(pool: Pool, events: int) -> list[Event]:
    happened: list[Event] = []
    deadline = time.monotonic() + 120.0
    while len(happened) < events:
        assert time.monotonic() < deadline
        ready, _ = ray.wait(pool.refs(), timeout=0.5)
        happened += pool.settle(set(ready))
    return happened


def test_bad_input_found_in_start_ends_the_run_with_its_own_sentence() -> None:
    with pytest.raises(UserError, match=r"^model\.path: no such folder$"):
        settle(opened(lambda: UserError("model.path: no such folder")), 1)


def test_a_worker_that_cannot_get_its_inputs_is_replaced() -> None:
    lost, started = settle(opened(lambda: ObjectLostError("ab12", None, "")), 2)
    assert isinstance(lost, Lost)
    assert (lost.worker, lost.replacement) == ("explorer-0", "explorer-0.1")
    assert "All copies of ab12 have been lost" in lost.reason
    assert isinstance(started, Started)
    assert started.worker == "explorer-0.1"


class Rests(Worker):
    """Gives memory back, unless it is the second one, which hangs."""

    def rest(self) -> int:
        if self._name == "explorer-1":
            time.sleep(3600.0)
        return 7


def test_who_does_not_leave_the_gpu_to_the_learner_in_time_is_replaced() -> None:
    pool = pool_of(Rests, replacements=1, deadlines=Deadlines(rest=5.0))
    pool.open("explorer-0")
    pool.open("explorer-1")
    pool.rest()  # nobody has started, so there is nothing to give back
    assert not pool.resting
    settle(pool, 2)
    pool.rest()
    assert pool.resting
    rested, lost = settle(pool, 2)
    assert rested == Rested("explorer-0", 7)
    assert isinstance(lost, Lost)
    assert (lost.worker, lost.reason) == ("explorer-1", "rest passed its deadline of 5 s")
    assert not pool.resting


class Broken(Worker):
    """Finds NaN wherever it looks, as memory that is damaged does; its replacement is well."""

    def explore(self, unit: WorkUnit) -> str:
        if "." not in self._name:
            raise NotFiniteError(f"NaN in {unit.id}")
        return unit.id


class Damaged:
    """A cast whose only explorer is broken."""

    def explorer(self, name: str) -> Any:
        return spawn(name, kind=Broken)

    def regenerator(self, name: str) -> Any:
        return spawn(name, "C")


def test_a_worker_with_too_many_strikes_is_replaced_and_a_second_refusal_of_a_unit_is_the_runs_error(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, "damaged", "fleet.strikes=2", "fleet.max_replacements=1")
    fleet = Fleet(config, Damaged(), Telemetry(config, RunFolder(tmp_path)))  # type: ignore[arg-type]
    fleet.open()
    while not fleet.score_class:
        fleet.events(seconds=1.0)
    first, second = units(2)
    for unit in (first, second):
        fleet.explorers.give("explorer-0", unit, "explore", unit)
    refused: list[Event] = []
    while len(refused) < 2:
        refused += fleet.events(seconds=1.0)
    assert refused == [Nonsense("explorer-0", unit, f"NaN in {unit.id}") for unit in (first, second)]
    fleet._strikes.answered("explorer-0")  # else, alone, it would end the run
    assert fleet.refuse("explorer-0", first, "NaN") is None
    lost = fleet.refuse("explorer-0", second, "NaN")
    assert lost == Lost("explorer-0", "strike 2: NaN", "explorer-0.1")
    assert fleet.refuse("explorer-0", second, "NaN") is None  # it has gone already
    with pytest.raises(RunError, match=r"preview/0/p0/0-0 was refused from explorer-0 and from explorer-0\.1: NaN"):
        fleet.refuse("explorer-0.1", first, "NaN")


class Told(Worker):
    """The first one is told to end in the middle of its first unit, as by a batch system that takes its node back."""

    def start(self) -> Attestation:
        termination.listen()
        return super().start()

    def explore(self, unit: WorkUnit) -> str:
        termination.check(self._name)
        if "." not in self._name:
            os.kill(os.getpid(), signal.SIGTERM)
        return unit.id


def units(count: int) -> list[WorkUnit]:
    return [WorkUnit(stage="preview", iteration=0, revision=0, prompt_id=f"p{n}", indices=(0,)) for n in range(count)]


def test_who_gets_sigterm_finishes_its_unit_and_is_replaced_at_no_cost() -> None:
    pool = pool_of(Told, credit=2)
    pool.open("explorer-0")
    settle(pool, 1)
    first, second = units(2)
    pool.give("explorer-0", first, "explore", first)
    pool.give("explorer-0", second, "explore", second)
    done, lost, started = settle(pool, 3)
    assert done == Done("explorer-0", first, first.id)
    assert lost == Lost("explorer-0", "explorer-0 was told to end by SIGTERM", "explorer-0.1")
    assert isinstance(started, Started)
    idle = pool._members["explorer-0.1"].handle
    ray.get(idle.__ray_call__.remote(lambda _: os.kill(os.getpid(), signal.SIGTERM)), timeout=60.0)
    pool.ping()
    assert settle(pool, 1) == [Lost("explorer-0.1", "explorer-0.1 was told to end by SIGTERM", "explorer-0.2")]


class Slow(Worker):
    """Is at its unit until the file appears."""

    def explore(self, unit: WorkUnit, gate: Path) -> str:
        while not gate.exists():
            time.sleep(0.05)
        return unit.id


def test_who_is_to_leave_finishes_first_and_a_pool_whose_rest_finds_no_place_ends_the_run(tmp_path: Path) -> None:
    pool = pool_of(
        lambda name: spawn(name, kind=Slow, resources={} if name == "explorer-0" else {"nowhere": 1}), credit=2
    )
    pool.open("explorer-0")
    settle(pool, 1)
    (unit,) = units(1)
    pool.give("explorer-0", unit, "explore", unit, tmp_path / "gate")
    pool.open("explorer-1")
    pool.open("explorer-2")
    pool._places = Places(pool._members, Deadlines(start=1.0))  # of who has none yet
    assert settle(pool, 2) == [Unplaced("explorer-1", 1.0), Unplaced("explorer-2", 1.0)]
    assert pool.roll.at_work == 1
    assert pool.roll.states()["explorer-1"] == "waiting for a place"
    pool.drain("explorer-0")
    pool.drain("explorer-2")
    assert settle(pool, 1) == [Left("explorer-2")]
    assert pool.roll.states()["explorer-0"] == "preview p0, then leaves"
    assert pool.slots() == []
    (tmp_path / "gate").touch()
    assert settle(pool, 2) == [Done("explorer-0", unit, unit.id), Left("explorer-0")]
    with pytest.raises(RunError, match=r"explorer-1 found no room in the cluster within 1 s .* no other worker"):
        settle(pool, 1)


class Warms(Worker):
    """Compiles for two shapes, the second time when it is told to."""

    def start(self) -> Attestation:
        return dataclasses.replace(super().start(), warm_ups=2)

    def warm_up(self, shape: int, go: Path) -> None:
        deadline = time.monotonic() + 60.0
        while shape == 1 and not go.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("early", [False, True], ids=["", "started before there is a revision"])
def test_who_compiles_shows_how_far_it_is_and_loads_a_revision_after_that(early: bool, tmp_path: Path) -> None:
    pool = pool_of(Warms)
    go = tmp_path / "go"
    pool.open("explorer-0")
    happened = settle(pool, 1) if early else []
    pool.publish(
        "revision 0",
        load,
        warm_up=lambda handle, shape: handle.warm_up.remote(shape, go),
    )
    assert pool.roll.warmed() == (0, 2 * early)
    started, warmed = [*happened, *settle(pool, 2 - len(happened))]
    assert isinstance(started, Started)
    assert warmed == Warmed("explorer-0", 1)
    assert (pool.roll.states(), pool.roll.warmed()) == ({"explorer-0": "warming up 2 of 2 shapes"}, (1, 2))
    assert pool.roll.census()["starting"] == 1
    assert pool.slots() == []
    go.touch()
    last, loaded = settle(pool, 2)
    assert last == Warmed("explorer-0", 0)
    assert isinstance(loaded, Loaded)
    assert pool.slots() == ["explorer-0"]
    assert pool.roll.warmed() == (2, 2)


def test_who_started_early_loads_a_revision_that_nobody_warms_up_for() -> None:
    pool = pool_of(Warms)
    pool.open("explorer-0")
    settle(pool, 1)
    pool.publish("revision 0", load)
    [loaded] = settle(pool, 1)
    assert isinstance(loaded, Loaded)
    assert pool.slots() == ["explorer-0"]


def test_a_warm_up_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    pool = pool_of(Warms, replacements=1, deadlines=Deadlines(warm_up=2.0))
    pool.open("explorer-0")
    pool.publish("revision 0", lambda handle, full: None, warm_up=lambda h, shape: h.warm_up.remote(1, tmp_path / "no"))
    _, lost = settle(pool, 2)
    assert isinstance(lost, Lost)
    assert lost.reason == "warm-up passed its deadline of 2 s"
    pool.renew()  # nobody is left at work
    assert list(pool.roll.states()) == ["explorer-0.2"]


class Guest(Worker):
    """Once it was lent it cannot load its run's weights any more; its replacement can."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lent = False

    def lend(self, loan: int) -> None:
        self._lent = True

    def load_revision(self, full: bool) -> Receipt:
        if self._lent:
            raise RunError("out of memory")
        return super().load_revision(full)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_who_is_lost_while_it_is_lent_is_replaced_at_no_cost_and_who_dies_idle_is_missed(killed: bool) -> None:
    pool = pool_of(Guest, deadlines=Deadlines(start=100.0, publish=10.0))
    pool.open("regenerator-0")
    pool.publish("revision 0", load)
    settle(pool, 2)
    pool.lend("regenerator-0", 1)
    assert settle(pool, 1) == [Lent("regenerator-0")]
    pool.ping()
    assert pool.refs() == []  # it may be at work for its borrower for long
    if killed:
        ray.kill(pool._members["regenerator-0"].handle)
    pool.take_back("regenerator-0")
    (call,) = pool._members["regenerator-0"].calls.values()
    assert call.seconds == 10.0 + (100.0 + 10.0)  # its own, after its borrower may have loaded weights and rewards
    lost, started, loaded = settle(pool, 3)
    assert isinstance(lost, Lost)
    assert (lost.replacement, lost.reason.endswith(", while it was lent")) == ("regenerator-0.1", True)
    assert ("out of memory" in lost.reason) is not killed
    assert isinstance(started, Started)
    assert isinstance(loaded, Loaded)
    pool.ping()
    assert not pool.awaited
    ready, _ = ray.wait(pool.refs(), timeout=60.0)
    assert (pool.settle(set(ready)), pool.roll.idle()) == ([], ["regenerator-0.1"])
    ray.kill(pool._members["regenerator-0.1"].handle)
    pool.ping()
    with pytest.raises(RunError, match=r"regenerator-0\.1 was lost .*, and all 0 replacements"):
        settle(pool, 1)


class Host(Worker):
    """Works for its borrower until the file is there."""

    def lend(self, loan: int) -> None:
        pass

    def work(self, until: Path) -> str:
        while not until.exists():
            time.sleep(0.02)
        return "done"


def test_who_is_lent_when_it_is_to_leave_finishes_what_it_does_for_its_borrower(tmp_path: Path) -> None:
    pool = pool_of(Host)
    pool.open("regenerator-0")
    pool.publish("revision 0", load)
    settle(pool, 2)
    pool.lend("regenerator-0", 1)
    settle(pool, 1)
    work = pool._members["regenerator-0"].handle.work.remote(tmp_path / "go")
    pool.drain("regenerator-0")
    assert pool.settle(set()) == []
    assert pool.roll.census()["draining"] == 1
    (tmp_path / "go").touch()
    loaded, left = settle(pool, 2)
    assert (type(loaded), left) == (Loaded, Left("regenerator-0"))
    assert ray.get(work, timeout=60.0) == "done"


class Dies(Worker):
    def start(self) -> Attestation:
        os._exit(1)


class Newcomers:
    """A cast whose second explorer is of another score class than the first; the third cannot start, the fourth dies in
    its start, and who takes its place does as well."""

    def explorer(self, name: str) -> Any:
        if name.startswith("explorer-3"):
            return spawn(name, kind=Dies)
        failure = (lambda: UserError("model.path: no such folder")) if name == "explorer-2" else None
        return spawn(name, "B" if name == "explorer-1" else "A", failure)

    def regenerator(self, name: str) -> Any:
        return spawn(name, "C")


def test_newcomers_that_cannot_work_with_the_others_leave_them_at_their_work(tmp_path: Path) -> None:
    config = small_config(tmp_path, "healthy", "fleet.max_replacements=1")
    telemetry = Telemetry(config, RunFolder(tmp_path))
    fleet = Fleet(config, Newcomers(), telemetry)  # type: ignore[arg-type]
    fleet._receipts._expected["old", 0] = {"explorer": Expected(modules=1, digest="")}
    fleet.open()
    fleet._counts["load_seconds"] = 0.0
    fleet.explorers.publish("revision 0", load)
    wait_for(fleet, lambda: fleet.explorers.ready() == ["explorer-0"])
    fleet.scale({"explorers": 4})
    wait_for(fleet, lambda: sum("cannot work with the others" in m for m in telemetry.progress().messages) == 3)
    assert list(fleet.explorers.roll.states()) == ["explorer-0"]
    said = "\n".join(telemetry.progress().messages)
    assert "explorer-1 and explorer-0 would score a unit differently" in said
    assert "explorer-2 cannot work with the others and has gone (model.path: no such folder)" in said
    assert "explorer-3.1 takes its place" in said
    assert "explorer-3.1 cannot work with the others and has gone (its worker is gone: " in said
    assert "1 explorers go on, and `solrl pool scale --explorers 2` tries once more" in said
    assert "explorer-1" not in (tmp_path / "attestations.json").read_text()
    fleet.scale({"explorers": 2})
    wait_for(fleet, lambda: fleet.explorers.ready() == ["explorer-0", "explorer-4"])


class Mixed:
    """A cast whose second explorer is of another score class than the first."""

    def explorer(self, name: str) -> Any:
        return spawn(name, "B" if name == "explorer-1" else "A")

    def regenerator(self, name: str) -> Any:
        return spawn(name, "C")


def wait_for(fleet: Fleet, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not reached():
        assert time.monotonic() < deadline
        fleet.events(seconds=1.0, needed=False)


def test_workers_of_one_pool_that_score_differently_are_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, "mixed", "fleet.explorers.count=2")
    fleet = Fleet(config, Mixed(), Telemetry(config, RunFolder(tmp_path)))  # type: ignore[arg-type]
    fleet.open()
    with pytest.raises(RunError, match="workers of one pool must be alike") as caught:
        wait_for(fleet, lambda: False)
    for words in ("explorer-0", "explorer-1", "device A", "device B"):
        assert words in str(caught.value)
    assert "regenerator" not in str(caught.value)


def test_nobody_at_work_is_an_error_for_whoever_waits_for_units_and_for_nobody_else(tmp_path: Path) -> None:
    config = small_config(tmp_path, "calm", "fleet.explorers.count=1")
    fleet = Fleet(config, Mixed(), Telemetry(config, RunFolder(tmp_path)), explores=False)  # type: ignore[arg-type]
    fleet.open()
    deadline = time.monotonic() + 120.0
    while fleet.at_work:
        assert time.monotonic() < deadline
        fleet.events(seconds=1.0)
    assert list(fleet.explorers.roll.states()) == []
    assert list(fleet.regenerators.roll.states()) == ["regenerator-0"]
    assert fleet.events(seconds=0.1, needed=False) == []
    with pytest.raises(RunError, match="no worker has a call in flight, yet the work is not done"):
        fleet.events(seconds=0.1)
