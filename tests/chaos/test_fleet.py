"""Fleets of small real actors: who may work together, and who is replaced for what it answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.events import Event, Lost, Nonsense
from actors.fleet.fleet import Fleet
from actors.fleet.places import Places
from actors.monitoring.telemetry import Telemetry
from solrl_ray.config.schema import Deadlines
from solrl_ray.errors import NotFiniteError, RunError, UserError
from solrl_ray.records import Attestation, Receipt, WorkUnit
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.manifest import Expected
from tests.chaos.pools import Worker, load, spawn, units
from tests.support.small import small_config
from tests.support.weight_sync import factors, publication, publisher

pytestmark = pytest.mark.usefixtures("local_ray")


def wait_for(fleet: Fleet, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not reached():
        assert time.monotonic() < deadline
        fleet.events(seconds=1.0, needed=False)


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
        fleet.explorers["explorers"].give("explorer-0", unit, "explore", unit)
    refused: list[Event] = []
    while len(refused) < 2:
        refused += fleet.events(seconds=1.0)
    assert refused == [Nonsense("explorer-0", unit, f"NaN in {unit.id}") for unit in (first, second)]
    fleet._strikes.answered("explorer-0")  # else, alone, it would end the run
    assert fleet.refuse("explorer-0", first, "NaN") is None
    lost = fleet.refuse("explorer-0", second, "NaN")
    assert lost == Lost("explorer-0", "strike 2: NaN", "explorer-0.1")
    assert fleet.refuse("explorer-0", second, "NaN") is None  # it has gone already
    with pytest.raises(RunError, match=r"explore/0/p0/0-0 was refused from explorer-0 and from explorer-0\.1: NaN"):
        fleet.refuse("explorer-0.1", first, "NaN")


class Dies(Worker):
    def start(self) -> Attestation:
        os._exit(1)


class Newcomers:
    """A cast whose second explorer is of another score class than the first; the third cannot start, the fourth dies in
    its start, and who takes its place does as well; for the sixth there is no room."""

    def explorer(self, name: str) -> Any:
        if name == "explorer-5":
            return spawn(name, resources={"nowhere": 1})
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
    fleet.explorers["explorers"].publish("revision 0", load)
    wait_for(fleet, lambda: fleet.explorers["explorers"].ready() == ["explorer-0"])
    fleet.scale({"explorers": 4})
    wait_for(fleet, lambda: sum("cannot work with the others" in m for m in telemetry.progress().messages) == 3)
    assert list(fleet.explorers["explorers"].roll.states()) == ["explorer-0"]
    said = "\n".join(telemetry.progress().messages)
    assert "explorer-1 and explorer-0 would score a unit differently" in said
    assert "explorer-2 cannot work with the others and has gone (model.path: no such folder)" in said
    assert "explorer-3.1 takes its place" in said
    assert "explorer-3.1 cannot work with the others and has gone (its worker is gone: " in said
    assert "1 explorers go on, and `solrl pool scale --explorers 2` tries once more" in said
    assert "explorer-1" not in (tmp_path / "attestations.json").read_text()
    fleet.scale({"explorers": 2})
    wait_for(fleet, lambda: fleet.explorers["explorers"].ready() == ["explorer-0", "explorer-4"])
    fleet.explorers["explorers"]._places = Places(fleet.explorers["explorers"]._members, Deadlines(start=1.0))
    fleet.scale({"explorers": 3})
    waits = "explorer-5 has found no place for 1 s, and waits; at work: 2"
    wait_for(fleet, lambda: waits in telemetry.progress().messages)


class Claims(Worker):
    """Says that it holds other weights than revision 1, that it bound nothing of revision 2, and the truth of 3."""

    def load_revision(self, content: Any, probe: Any, full: bool) -> Receipt:  # type: ignore[override]
        manifest = payload.read(content).manifest
        held = manifest.expected["explorer"]
        return replace(
            super().load_revision(full),
            revision=manifest.revision,
            bound_modules=0 if manifest.revision == 2 else held.modules,
            buffer_digest="another" if manifest.revision == 1 else held.digest,
        )


class Claiming:
    def explorer(self, name: str) -> Any:
        return spawn(name, kind=Claims)

    def regenerator(self, name: str) -> Any:
        return spawn(name, "C")


def test_a_receipt_of_other_weights_than_were_published_ends_the_run(tmp_path: Path) -> None:
    config = small_config(tmp_path, "claiming", "fleet.explorers.count=1")
    fleet = Fleet(config, Claiming(), Telemetry(config, RunFolder(tmp_path)))  # type: ignore[arg-type]
    fleet.open()

    def publish(revision: int) -> None:
        fleet.publish("explorer", publication(publisher().build(revision, factors())), probe=None)
        wait_for(fleet, lambda: fleet.explorers["explorers"].ready() == ["explorer-0"])

    stated = "its receipt states 2 modules, another; published were 2 modules, [0-9a-f]{12}"
    with pytest.raises(RunError, match=rf"^explorer-0 \(explorer\) does not hold revision 1: {stated}$"):
        publish(1)
    with pytest.raises(RunError, match=r"^explorer-0 \(explorer\) bound no module of revision 2$"):
        publish(2)
    publish(3)


class Mixed:
    """A cast whose second explorer is of another score class than the first."""

    def explorer(self, name: str) -> Any:
        return spawn(name, "B" if name == "explorer-1" else "A")

    def regenerator(self, name: str) -> Any:
        return spawn(name, "C")


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
    assert list(fleet.explorers["explorers"].roll.states()) == []
    assert list(fleet.regenerators.roll.states()) == ["regenerator-0"]
    assert fleet.events(seconds=0.1, needed=False) == []
    with pytest.raises(RunError, match="no worker has a call in flight, yet the work is not done"):
        fleet.events(seconds=0.1)
