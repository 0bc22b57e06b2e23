"""Held-out evaluation without workers: its units, and the name by which a run's actors are found."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from actors.roles import namespace
from solrl_ray.evaluation import HELD_AS, HOLDERS, evaluation_units
from solrl_ray.records import Prompt
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
