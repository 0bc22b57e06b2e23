"""Held-out evaluation without workers: its units, and the name by which a run's actors are found."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from actors.client.controller_actor import namespace
from actors.evaluation.evaluator import Evaluator, collect
from actors.fleet.events import Done
from actors.monitoring.disk_watchdog import DiskWatchdog
from actors.workers.regenerator import Evaluated
from solrl_ray.errors import RunError
from solrl_ray.evaluation.held_out import EVAL_POLICIES, UNIT_POLICY, evaluation_units
from solrl_ray.metrics.records import EvaluationMetrics
from solrl_ray.records import Prompt, WorkUnit
from solrl_ray.storage.run_folder import RunFolder
from tests.support import made_runs

PROMPTS = [Prompt(id="aa", text="a red circle"), Prompt(id="bb", text="two green triangles")]


def test_a_late_answer_of_one_evaluation_is_none_of_the_next() -> None:
    """Real pictures, the base and, after a warm start, the average are scored one after the other at 0 updates."""
    made = [set(evaluation_units(made_runs.config(), PROMPTS, updates=0, policy=UNIT_POLICY[p])) for p in UNIT_POLICY]
    assert all(len(units) == 2 for units in made)
    assert all(one.isdisjoint(other) for one, other in combinations(made, 2))
    assert len(set(EVAL_POLICIES.values())) == len(EVAL_POLICIES)


def test_a_runs_actors_are_found_by_whatever_way_its_folder_is_named(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    assert namespace(tmp_path / "link") == namespace(tmp_path / "runs" / ".." / "runs" / "demo") == namespace(run)
    assert namespace(tmp_path / "elsewhere" / "demo") != namespace(run)


class Two:
    """A fleet of two regenerators, of which each does every unit; the second one's rewards are others.

    Also the rollout and telemetry of an evaluation, of which only messages are kept.
    """

    def __init__(self) -> None:
        self.regenerators, self.given, self.said = self, list[tuple[str, WorkUnit]](), list[str]()
        self.disk = DiskWatchdog(Path(), seconds=60.0)

    def slots(self) -> list[str]:
        return ["regenerator-0"] * 2

    def hedges(self, pool: Any) -> list[tuple[str, WorkUnit]]:
        return [("regenerator-1", unit) for unit in UNITS]

    def give(self, worker: str, unit: WorkUnit, method: str, *arguments: Any) -> None:
        self.given.append((worker, unit))

    def events(self, *, seconds: float) -> list[Done]:
        return [Done(worker, unit, answer(worker, unit)) for worker, unit in self.given]

    def hand_out(self) -> None: ...

    def take(self, events: Any) -> None: ...

    def state(self, words: str, *, stage: str) -> None: ...

    def evaluation(self, metrics: EvaluationMetrics, pictures: Any) -> None: ...

    def message(self, text: str) -> None:
        self.said.append(text)

    def stage(self, name: str, done: int, total: int) -> None: ...


UNITS = evaluation_units(made_runs.config(), PROMPTS, updates=0, policy="old")


def answer(worker: str, unit: WorkUnit) -> Evaluated:
    reward = 0.5 if worker == "regenerator-0" or unit.prompt_id == "aa" else 0.7
    return Evaluated(unit=unit, rewards=(reward,), images=None, seconds=0.1, started=0.0)


def arguments(unit: WorkUnit) -> tuple[WorkUnit]:
    return (unit,)


def test_of_two_answers_that_differ_the_first_counts_and_that_is_told_and_counted() -> None:
    fleet = Two()
    found = collect(fleet, fleet, UNITS, "evaluate", arguments, strict=False)  # type: ignore[arg-type]
    assert {prompt: evaluated.rewards for prompt, evaluated in found.answers.items()} == {"aa": (0.5,), "bb": (0.5,)}
    assert (found.duplicates, found.differing) == (2, 1)
    (said,) = fleet.said
    assert said.startswith("regenerator-1 has other rewards for evaluate/0/bb/0-")
    assert said.endswith(" than regenerator-0; the first ones count")


def run_evaluation(folder: RunFolder, *, strict: bool) -> None:
    fleet, config = Two(), made_runs.config()
    changed = {"evaluation": {"pictures": 0}, "fleet": {"strict": strict}}
    config = config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in changed.items()}
    )
    evaluator = Evaluator(config, fleet, folder, fleet, fleet)  # type: ignore[arg-type]
    evaluator.run("base", 0, PROMPTS, dict.fromkeys(("aa", "bb")))


def test_the_record_of_an_evaluation_says_how_many_results_came_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    run_evaluation(folder, strict=False)
    (record,) = [json.loads(path.read_text()) for path in folder.evaluations.glob("*.json")]
    assert (record["duplicate_results"], record["differing_results"]) == (2, 1)


def test_where_fleet_strict_is_set_two_answers_that_differ_end_the_run(tmp_path: Path) -> None:
    said = r"^regenerator-1 has other rewards for evaluate/0/bb/.* than regenerator-0, and fleet\.strict is true$"
    with pytest.raises(RunError, match=said):
        run_evaluation(RunFolder(tmp_path), strict=True)
    assert not RunFolder(tmp_path).evaluations.exists()
