"""The selector is killed between receiving and acknowledging; a new one goes on from the journal."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.dispatch.selector_client import SelectorClient
from actors.fleet.actor_factory import ActorClasses, ActorFactory
from actors.fleet.budget import Budget
from actors.workers.selector import Ack, Selector
from solrl_ray.errors import RunError
from solrl_ray.records import SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationSummary, group_digest
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.storage.run_folder import RunFolder
from tests.support.small import small_config

pytestmark = pytest.mark.usefixtures("local_ray")

PLAN = IterationPlan(iteration=4, revision=4, prompt_ids=("beef", "cafe"), pool=4, keep=2, micro_batch=2)
AHEAD = replace(PLAN, iteration=5, revision=5, staleness=1)
REWARDS = {"beef": (0.1, 0.6, 0.3, 0.5), "cafe": (0.5, 0.25, 0.75, 1.0)}


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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = Stuck(folder)

    def close(self, iteration: int) -> IterationSummary:
        die_once(self._folder.path, "closing")
        return super().close(iteration)

    def record(self, result: UnitResult) -> WorkUnit | None:
        if result.unit.prompt_id == "cafe":
            die_once(self._folder.path, "before")
        ready = super().record(result)
        die_once(self._folder.path, "recorded")
        return ready

    def store(self, group: SampleGroup) -> Outcome:
        outcome = super().store(group)
        die_once(self._folder.path, "taken")
        return outcome


def client(folder: Path, at_work: list[tuple[str, WorkUnit]], *, replacements: int = 4) -> SelectorClient:
    def spawn(name: str) -> Any:
        return ray.remote(Killed).options(name=f"{folder.name}-{name}", num_cpus=0).remote(folder)

    return SelectorClient(
        spawn, seconds=60.0, budget=Budget(replacements), held=lambda: list(at_work), tell=lambda _: None
    )


def result_of(unit: WorkUnit) -> UnitResult:
    rewards = tuple(REWARDS[unit.prompt_id][i] for i in unit.indices)
    return UnitResult(unit=unit, rewards=rewards, worker="explorer-0", score_class="c", seconds=0.1)


def group_of(unit: WorkUnit) -> SampleGroup:
    return SampleGroup(
        iteration=4,
        revision=4,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        rewards=(0.9, 0.1),
        latents=torch.tensor([[1.0], [float(len(unit.prompt_id))]]),
    )


def test_what_a_killed_selector_did_not_acknowledge_is_sent_again_and_folds_away(tmp_path: Path) -> None:
    at_work: list[tuple[str, WorkUnit]] = []
    selector = client(tmp_path, at_work)
    assert selector.open(PLAN).candidates == 0
    at_work += selector.ask("lease", 4, "explore", ["explorer-0"] * 4)
    assert len(at_work) == 4
    selector.open(AHEAD)
    at_work += selector.ask("lease", 5, "explore", ["explorer-2"])
    while len(at_work) > 1:  # the one of the next iteration stays at work all the time
        _, unit = at_work.pop(0)
        selector.ask("take", [result_of(unit)])
        assert selector.ask("lease", 4, "explore", ["explorer-1"]) == []  # nobody does what is at work already
    full = [unit for _, unit in selector.ask("lease", 4, "regenerate", ["regenerator-0"] * 3)]
    assert [(unit.prompt_id, unit.indices) for unit in full] == [("beef", (1, 0)), ("cafe", (3, 1))]
    for unit in full:
        assert selector.take_groups(4, [ray.put(group_of(unit))]) == [Ack()]
    closed = selector.ask("close", 4)
    assert selector.restarts == 4
    assert [tuple(c.index for c in selection.chosen) for selection in closed.selections] == [(1, 0), (3, 1)]
    assert closed.proxy_mean == pytest.approx(0.5)
    assert (closed.counts.candidates, closed.counts.groups, closed.counts.violations) == (8, 2, 0)
    stored = ray.get(selector.stored(4, "cafe"))
    assert group_digest(stored) == group_digest(group_of(full[1]))
    left = selector.ask("lease", 5, "explore", ["explorer-2"] * 4)
    assert [unit for _, unit in left] == AHEAD.pool_units()[1:]  # the new selectors knew of that iteration, too


class Hangs(Selector):
    """Once, when it is asked for units."""

    def lease(self, iteration: int, stage: str, slots: list[str]) -> list[tuple[str, WorkUnit]]:
        try:
            (self._folder.path / "hung").touch(exist_ok=False)
        except FileExistsError:
            return super().lease(iteration, stage, slots)
        time.sleep(3600.0)
        return []


def test_a_selector_that_hangs_is_restarted_and_asked_again(tmp_path: Path) -> None:
    said: list[str] = []

    def tell(sentence: str) -> None:
        said.append(sentence)
        selector._seconds = 60.0

    def spawn(name: str) -> Any:
        return ray.remote(Hangs).options(name=f"{tmp_path.name}-{name}", num_cpus=0).remote(tmp_path)

    selector = SelectorClient(spawn, seconds=60.0, budget=Budget(1), held=list, tell=tell)
    selector.open(PLAN)
    selector._seconds = 1.0  # it has started: a start takes longer
    assert [unit for _, unit in selector.ask("lease", 4, "explore", ["explorer-0"])] == PLAN.pool_units()[:1]
    late = "the selector's answer to lease failed: no answer within its deadline of 1 s"
    assert said == [f"the selector is restarted and replays its journal ({late})"]


def test_a_strict_run_ends_with_a_result_that_comes_again_with_other_bytes(tmp_path: Path) -> None:
    cast = ActorFactory(small_config(tmp_path, "strict", "fleet.strict=true"), tmp_path, ActorClasses())
    selector = SelectorClient(cast.selector, seconds=60.0, budget=Budget(0), held=list, tell=lambda _: None)
    selector.open(PLAN)
    [(_, unit)] = selector.ask("lease", 4, "explore", ["explorer-0"])
    for _ in range(2):
        selector.ask("take", [result_of(unit)])  # the same again is none
    other = replace(result_of(unit), rewards=(0.5, 0.5), worker="explorer-1")
    with pytest.raises(
        RunError, match=rf"^explorer-1 brought other bytes for {unit.id} than explorer-0, and fleet\.strict is true$"
    ):
        selector.ask("take", [other])


def test_a_selector_that_keeps_dying_ends_the_run_with_its_diagnosis(tmp_path: Path) -> None:
    selector = client(tmp_path, [], replacements=0)
    selector.open(PLAN)
    _, unit = selector.ask("lease", 4, "explore", ["explorer-0"])[0]
    with pytest.raises(RunError, match=r"the selector was lost \(the selector's answer to take failed: its worker is "):
        selector.ask("take", [result_of(unit)])
