"""Fleets of small real actors: how a failure arrives, who is replaced, who leaves, and who may work together."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectLostError

from actors.cluster import termination
from actors.fleet import worker
from actors.fleet.actor_factory import Actor
from solrl_ray.config.fleet import Deadlines
from solrl_ray.errors import NotFiniteError, RewardError, RunError, UserError
from solrl_ray.records import Attestation, Receipt, WorkUnit
from solrl_ray.weight_sync.payload import Payload
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR
from tests.chaos.fleets import Explored, Slow, Worker, opened, revision, run, spawn, units
from tests.support.patience import patience, until

pytestmark = pytest.mark.usefixtures("local_ray")


class Broken(Worker):
    """Finds NaN in units 1 and 2, as memory that is damaged does; its replacements are well. In unit 3 there is NaN."""

    def explore(self, unit: WorkUnit) -> Explored:
        if unit.prompt_id == "p3" or ("." not in self._name and unit.prompt_id in ("p1", "p2")):
            raise NotFiniteError(f"NaN in {unit.id}")
        return super().explore(unit)


def test_a_worker_with_too_many_strikes_is_replaced_and_a_second_refusal_of_a_unit_is_the_runs_error(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        strict = ("fleet.strikes=2", "fleet.max_replacements=2", "fleet.max_inflight=1")
        async with opened(tmp_path, Broken, *strict) as scene:
            await scene.publish(EXPLORER, revision(0))
            fine, first, second, never = units(4)
            scene.ask([fine])
            await until(lambda: scene.answers)
            scene.ask([first, second])
            await until(lambda: len(scene.answers) == 3)
            assert scene.answers == {fine.id: "explorer-0", first.id: "explorer-0.1", second.id: "explorer-0.1"}
            reason = "NaN in explore/0/p1/0-0"
            assert f"{first.describe()} is repeated; strike 1 of 2 for explorer-0: {reason}" in scene.said
            assert f"explorer-0 was lost (strike 2: {reason}); explorer-0.1 takes its place" in scene.said
            assert scene.fleet.replacements.left == 1
            scene.ask([never])
            await until(lambda: False)

    refused = r"^explore \(iteration 1, prompt p3, .*\) was refused from explorer-0\.1 and from explorer-0\.2: NaN in "
    with pytest.raises(RunError, match=refused):
        run(test)


class Dies(Worker):
    def start(self) -> Attestation:
        os._exit(1)


def newcomer(name: str) -> Actor:
    """The second explorer is of another score class than the first; the third cannot start, the fourth dies in its
    start, and so does the one that takes its place; for the sixth there is no room."""
    if name == "explorer-5":
        return spawn(name, resources={"nowhere": 1})
    if name.startswith("explorer-3"):
        return spawn(name, kind=Dies)
    failure = (lambda: UserError("model.path: no such folder")) if name == "explorer-2" else None
    return spawn(name, "B" if name == "explorer-1" else "A", failure)


def test_newcomers_that_cannot_work_with_the_others_leave_them_at_their_work(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, newcomer, "fleet.max_replacements=1") as scene:
            await scene.publish(EXPLORER, revision(0))
            await until(lambda: scene.ready() == ["explorer-0"])
            assert await scene.fleet.scale({"explorers": 4}) == (
                "explorers go from 1 to 4: new ones work once they have started and proved their weights"
            )
            await until(lambda: sum("cannot work with the others" in message for message in scene.said) == 3)
            assert list(scene.explorers.workers) == ["explorer-0"]
            said = "\n".join(scene.said)
            assert "explorer-1 and explorer-0 would score the same unit differently" in said
            assert "explorer-2 cannot work with the others and was removed (model.path: no such folder)" in said
            assert "explorer-3.1 takes its place" in said
            assert "explorer-3.1 cannot work with the others and was removed (its worker is gone: " in said
            assert "1 explorers go on, and `solrl pool scale --explorers 2` tries again" in said
            await scene.telemetry.written()
            assert "explorer-1" not in (tmp_path / "attestations.json").read_text()
            await scene.fleet.scale({"explorers": 2})
            await until(lambda: scene.ready() == ["explorer-0", "explorer-4"])
            scene.explorers._deadlines = Deadlines(start=1.0)
            await scene.fleet.scale({"explorers": 3})
            await scene.says("explorer-5 has waited 1 s for free resources and still waits; 2 of its pool are working")
            await scene.fleet.scale({"explorers": 1})
            await scene.says("explorer-5 leaves after its present units")
            await scene.says("explorer-5 has left")
            await until(lambda: scene.ready() == ["explorer-0"] == list(scene.explorers.workers))

    run(test)


class Claims(Worker):
    """Says that it holds other weights than revision 1, that it bound nothing of revision 2, and the truth of 3."""

    def load_revision(self, payload: Payload, probe: Any, full: bool) -> Receipt:
        receipt, number = super().load_revision(payload, probe, full), payload.manifest.revision
        assert isinstance(receipt, Receipt)
        return replace(
            receipt,
            bound_modules=0 if number == 2 else receipt.bound_modules,
            buffer_digest="another" if number == 1 else receipt.buffer_digest,
        )


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (1, "does not hold revision 1: its receipt states 2 modules, another; published were 2 modules, [0-9a-f]{12}"),
        (2, "bound no module of revision 2: none of its weights was updated"),
        (3, ""),
    ],
)
def test_a_receipt_of_other_weights_than_were_published_ends_the_run(
    number: int, sentence: str, tmp_path: Path
) -> None:
    async def test() -> None:
        async with opened(tmp_path, Claims) as scene:
            await scene.publish(EXPLORER, revision(number))
            await until(scene.ready)

    if not sentence:
        run(test)
        return
    with pytest.raises(RunError, match=rf"^explorer-0 \(explorer\) {sentence}$"):
        run(test)


def test_a_receipt_counts_however_many_policies_the_other_workers_were_sent_meanwhile(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, spawn, "fleet.max_replacements=1") as scene:
            await scene.publish(EXPLORER, revision(0))
            await until(scene.ready)
            for number in range(1, 7):  # as evaluations do
                await scene.publish(REGENERATOR, revision(number))
            await until(lambda: scene.ready(scene.fleet.regenerators))
            scene.explorers.retire("explorer-0", "of the test")
            await until(lambda: scene.ready() == ["explorer-0.1"])

    run(test)


def mixed(name: str) -> Actor:
    """The second explorer is of another score class than the first."""
    return spawn(name, "B" if name == "explorer-1" else "A")


def test_workers_of_one_pool_that_score_differently_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, mixed, "fleet.explorers.count=2"):
            await until(lambda: False)

    with pytest.raises(RunError, match="all workers of a pool need the same kind of device") as caught:
        run(test)
    for words in ("explorer-0", "explorer-1", "device A", "device B"):
        assert words in str(caught.value)
    assert "regenerator" not in str(caught.value)


def test_a_worker_that_cannot_get_its_inputs_is_replaced(tmp_path: Path) -> None:
    def spawned(name: str) -> Actor:
        return spawn(name, failure=lambda: ObjectLostError("ab12", None, ""))

    async def test() -> None:
        async with opened(tmp_path, spawned, "fleet.max_replacements=1") as scene:
            await scene.publish(EXPLORER, revision(0))
            await until(lambda: scene.ready() == ["explorer-0.1"])
            (lost,) = [message for message in scene.said if message.startswith("explorer-0 was lost (")]
            assert "ab12" in lost

    run(test)


class Crashes(Worker):
    """The first one dies at its first unit."""

    def explore(self, unit: WorkUnit) -> Explored:
        if self._name == "explorer-0":
            os._exit(1)
        return super().explore(unit)


class Hangs(Worker):
    """The first one hangs at its first unit."""

    def explore(self, unit: WorkUnit) -> Explored:
        if self._name == "explorer-0":
            time.sleep(3600.0)
        return super().explore(unit)


@pytest.mark.parametrize("kind", [Crashes, Hangs])
def test_the_units_of_a_worker_that_crashes_or_hangs_go_to_others_and_first(kind: type[Worker], tmp_path: Path) -> None:
    seconds = patience(3.0)
    settings = ("fleet={explorers: {count: 2}, max_inflight: 2, max_replacements: 1}",)

    async def test() -> None:
        async with opened(tmp_path, kind, *settings, f"fleet.deadlines.explore={seconds}") as scene:
            await scene.publish(EXPLORER, revision(0))
            await until(lambda: len(scene.ready()) == 2)
            asked = units(6)
            scene.ask(asked)
            await until(lambda: len(scene.answers) == 6)
            assert set(scene.answers) == {unit.id for unit in asked}
            assert "explorer-0" not in scene.answers.values()
            assert scene.requeued == 2
            assert "2 units of explorer-0 go to others" in scene.said
            reason = "its worker is gone: " if kind is Crashes else f"{asked[0].describe()} passed its deadline of "
            assert any(message.startswith(f"explorer-0 was lost ({reason}") for message in scene.said)
            await until(lambda: scene.ready() == ["explorer-1", "explorer-0.1"])
            assert scene.fleet.replacements.left == 0

    run(test)


def test_a_death_is_noticed_while_nobody_has_work_and_one_without_a_replacement_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PING_SECONDS", 0.2)

    async def test() -> None:
        async with opened(tmp_path, spawn, "fleet.max_replacements=1") as scene:
            await scene.publish(EXPLORER, revision(0))
            for name in ("explorer-0", "explorer-0.1"):
                await until(lambda name=name: scene.ready() == [name])
                scene.world.kill(scene.explorers.workers[name].actor)
            await until(lambda: False)

    with pytest.raises(RunError, match=r"^explorer-0\.1 was lost \(.*\), and all 1 replacements"):
        run(test)


class Told(Worker):
    """The first one is told to end in the middle of its first unit, as by a batch system that takes its node back."""

    def start(self) -> Attestation:
        termination.listen()
        return super().start()

    def explore(self, unit: WorkUnit) -> Explored:
        termination.check(self._name)
        if "." not in self._name:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().explore(unit)


def test_who_gets_sigterm_finishes_its_unit_and_is_replaced_at_no_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PING_SECONDS", 0.2)

    async def test() -> None:
        async with opened(tmp_path, Told, "fleet.max_inflight=2", "fleet.max_replacements=0") as scene:
            await scene.publish(EXPLORER, revision(0))
            first, second = units(2)
            scene.ask([first, second])
            await until(lambda: len(scene.answers) == 2)
            assert scene.answers == {first.id: "explorer-0", second.id: "explorer-0.1"}
            told = "{0} was lost ({0} received SIGTERM); {1} takes its place"
            assert told.format("explorer-0", "explorer-0.1") in scene.said
            idle = scene.explorers.workers["explorer-0.1"].actor.handle
            await idle.__ray_call__.remote(lambda _: os.kill(os.getpid(), signal.SIGTERM))
            await until(lambda: scene.ready() == ["explorer-0.2"])
            assert told.format("explorer-0.1", "explorer-0.2") in scene.said

    run(test)


class Errs(Slow):
    """Every one but the first raises an error of its unit."""

    def explore(self, unit: WorkUnit, gate: Path) -> Explored:  # type: ignore[override]
        answer = super().explore(unit, gate)
        if self._name != "explorer-0":
            raise RewardError(f"no tokenizer for {unit.prompt_id}")
        return answer


@pytest.mark.parametrize("leaves", [False, True])
def test_an_error_of_a_unit_ends_the_run_except_that_of_who_leaves_whose_unit_goes_to_others(
    leaves: bool, tmp_path: Path
) -> None:
    async def test() -> None:
        settings = ("fleet={explorers: {count: 2}, max_inflight: 1, max_replacements: 0}",)
        async with opened(tmp_path, Errs, *settings) as scene:
            await scene.publish(EXPLORER, revision(0))
            await until(lambda: len(scene.ready()) == 2)
            first, second = units(2)
            scene.ask([first, second], tmp_path / "gate")
            await until(lambda: scene.describe() == {"explorer-0": "explore p0", "explorer-1": "explore p1"})
            if leaves:
                assert scene.explorers.resize(1) == ["explorer-1"]
            (tmp_path / "gate").touch()
            await until(lambda: len(scene.answers) == 2)
            assert scene.answers == {first.id: "explorer-0", second.id: "explorer-0"}
            assert scene.requeued == 1
            assert "explorer-1 was lost (no tokenizer for p1); it was leaving" in scene.said
            assert "1 units of explorer-1 go to others" in scene.said

    if leaves:
        run(test)
        return
    with pytest.raises(RewardError, match=r"^no tokenizer for p1$"):
        run(test)


def placed(name: str) -> Actor:
    """Only the first finds a place."""
    return spawn(name, kind=Slow, resources={} if name == "explorer-0" else {"nowhere": 1})


def test_who_is_to_leave_finishes_first_and_a_pool_whose_rest_finds_no_place_ends_the_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, placed, "fleet.max_inflight=2") as scene:
            pool = scene.explorers
            await scene.publish(EXPLORER, revision(0))
            await until(scene.ready)
            pool._deadlines = Deadlines(start=1.0)  # of those who have no place yet
            (unit, other) = units(2)
            scene.ask([unit], tmp_path / "gate")
            await until(lambda: scene.describe()["explorer-0"] == "explore p0")
            pool.resize(3)
            for name in ("explorer-1", "explorer-2"):
                await scene.says(f"{name} has waited 1 s for free resources and still waits; 1 of its pool are working")
            assert scene.describe()["explorer-1"] == "waiting for resources"
            assert pool.resize(2) == ["explorer-2"]
            await scene.says("explorer-2 has left")
            assert pool.leave_nodes([pool.workers["explorer-0"].node]) == [("explorer-0", "explorer-0.1")]
            assert scene.describe()["explorer-0"] == "explore p0, then leaves"
            scene.ask([other], tmp_path / "gate")  # not for who leaves
            await asyncio.sleep(0.2)
            (tmp_path / "gate").touch()
            await scene.says("explorer-0 has left")
            assert scene.answers == {unit.id: "explorer-0"}
            await until(lambda: False)

    said = r"^explorer-1, explorer-0\.1 found no room in the cluster within 1 s .* no other worker of the pool is left"
    with pytest.raises(RunError, match=said):
        run(test)


class Warms(Worker):
    """Compiles for two shapes, the second time when the file is there."""

    def start(self) -> Attestation:
        return replace(super().start(), warm_ups=2)

    def warm_up(self, shape: int, probe: str) -> None:
        while shape == 1 and not Path(probe).exists():
            time.sleep(0.02)


def test_who_compiles_shows_how_far_it_is_loads_a_revision_after_that_and_has_a_deadline(tmp_path: Path) -> None:
    settings = ("fleet.max_replacements=1", f"fleet.deadlines.warm_up={patience(3.0)}")

    async def test() -> None:
        async with opened(tmp_path, Warms, *settings) as scene:
            await until(lambda: scene.explorers.warmed() == (0, 2))
            await scene.publish(EXPLORER, revision(0), probe=str(tmp_path / "go"))
            await until(lambda: scene.explorers.warmed() == (1, 2))
            assert scene.describe() == {"explorer-0": "warming up 2 of 2 shapes"}
            assert scene.explorers.census()["starting"] == 1
            await scene.says("explorer-0 was lost (warm-up passed its deadline of ")
            assert not scene.ready()
            (tmp_path / "go").touch()
            await until(lambda: scene.ready() == ["explorer-0.1"])
            assert scene.explorers.warmed() == (2, 2)

    run(test)
