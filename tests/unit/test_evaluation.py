"""Held-out evaluation without workers: its units, and the name by which a run's actors are found."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

from actors.evaluator import collect
from actors.events import Done
from actors.regenerator import Evaluated
from actors.roles import namespace
from solrl_ray.evaluation import HELD_AS, HOLDERS, evaluation_units
from solrl_ray.records import Prompt, WorkUnit
from tests.unit import made_runs

PROMPTS = [Prompt(id="aa", text="a red circle"), Prompt(id="bb", text="two green triangles")]


def test_a_late_answer_of_one_evaluation_is_none_of_the_next() -> None:
    """Real pictures, the base and, after a warm start, the average are scored one after the other at 0 updates."""
    made = [set(evaluation_units(made_runs.config(), PROMPTS, updates=0, policy=HELD_AS[p])) for p in HELD_AS]
    assert all(len(units) == 2 for units in made)
    assert all(one.isdisjoint(other) for one, other in combinations(made, 2))
    assert len(set(HOLDERS.values())) == len(HOLDERS)


def test_a_runs_actors_are_found_by_whatever_way_its_folder_is_named(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    assert namespace(tmp_path / "link") == namespace(tmp_path / "runs" / ".." / "runs" / "demo") == namespace(run)
    assert namespace(tmp_path / "elsewhere" / "demo") != namespace(run)


class Two:
    """A fleet of two regenerators, of which each does every unit; the second one's rewards are others."""

    def __init__(self) -> None:
        self.regenerators, self.given, self.said = self, list[tuple[str, WorkUnit]](), list[str]()

    def slots(self) -> list[str]:
        return ["regenerator-0"] * 2

    def hedges(self, pool: Any) -> list[tuple[str, WorkUnit]]:
        return [("regenerator-1", unit) for unit in UNITS]

    def give(self, worker: str, unit: WorkUnit, method: str, *arguments: Any) -> None:
        self.given.append((worker, unit))

    def events(self, *, seconds: float) -> list[Done]:
        return [Done(worker, unit, answer(worker, unit)) for worker, unit in self.given]

    def message(self, text: str) -> None:
        self.said.append(text)

    def stage(self, name: str, done: int, total: int) -> None: ...


UNITS = evaluation_units(made_runs.config(), PROMPTS, updates=0, policy="old")


def answer(worker: str, unit: WorkUnit) -> Evaluated:
    reward = 0.5 if worker == "regenerator-0" or unit.prompt_id == "aa" else 0.7
    return Evaluated(unit=unit, rewards=(reward,), images=None, seconds=0.1, started=0.0)


def test_of_two_answers_that_differ_the_first_counts_and_that_is_told() -> None:
    fleet = Two()
    found = collect(fleet, fleet, UNITS, "evaluate", lambda unit: (unit,))  # type: ignore[arg-type]
    assert {prompt_id: evaluated.rewards for prompt_id, evaluated in found.items()} == {"aa": (0.5,), "bb": (0.5,)}
    (said,) = fleet.said
    assert said.startswith("regenerator-1 has other rewards for evaluate/0/bb/0-")
    assert said.endswith(" than regenerator-0; the first ones count")
