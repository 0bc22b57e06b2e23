"""The rehearsal of a real run: which phase each moment of a command belongs to, and what it runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal

import phases
import pytest
import rehearsal

from solrl_ray.config.checks import check
from solrl_ray.report.trace import Span, TraceWriter

BEGAN = 1000.0


def span(stage: str, started: float, ended: float, name: str = "", worker: str = "", iteration: int = 0) -> Span:
    """From `started` to `ended` seconds after the command."""
    kind: Literal["unit", "stage"] = "unit" if worker else "stage"
    return Span(
        kind=kind,
        name=name or stage,
        stage=stage,
        iteration=iteration,
        started=BEGAN + started,
        seconds=ended - started,
        worker=worker,
    )


TIMELINE = [
    span("start", 10, 40),
    span("start", 12, 20, "loading transformer", "learner-0"),
    span("start", 20, 23, "moving transformer to cuda", "learner-0"),
    span("start", 18, 22, "loading the reward pickscore", "explorer-0"),
    span("start", 30, 42, "compiling 1 of 3 forwards", "explorer-0"),  # into the next stage
    span("publish", 40, 41),
    span("evaluate", 41, 50),
    span("evaluate", 43, 49, "evaluate/0", "regenerator-0"),
    span("rollout", 50, 70),
    span("explore", 51, 60, "explore/0", "explorer-0"),
    span("regenerate", 58, 65, "regenerate/0", "regenerator-0"),
    span("learn", 70, 80),
    span("checkpoint", 80, 81),
    span("report", 83, 85),
]
PHASES = {
    "starting the command": 10.0,
    "ending the command": 5.0,  # 85 to 90
    "compiling": 12.0,
    "reading files": 10.0,  # 12 to 22, two workers
    "moving": 1.0,  # 22 to 23: before, another one still read
    "evaluation": 8.0,  # 42 to 50
    "exploring": 9.0,
    "regenerating": 5.0,  # 60 to 65, when nothing was explored any more
    "learning": 10.0,
    "checkpoint": 1.0,
    "report": 2.0,
    "starting workers": 9.0,  # 10 to 12 and 23 to 30
    "rest": 8.0,  # 50 to 51 and 65 to 70 without a unit, 81 to 83 without a stage
}
"""By hand."""


def test_each_moment_of_the_command_belongs_to_one_phase() -> None:
    found = phases.phases(TIMELINE, BEGAN, BEGAN + 90)
    assert found == PHASES
    assert sum(found.values()) == 90


def test_a_run_that_was_stopped_has_phases_until_then() -> None:
    begun = [one for one in TIMELINE if one.started < BEGAN + 55]
    found = phases.phases(begun, BEGAN, BEGAN + 55)
    assert found["exploring"] == 4.0
    assert sum(found.values()) == 55


def test_a_command_that_ended_before_its_first_span_was_only_started() -> None:
    assert phases.phases([], BEGAN, BEGAN + 3) == {"starting the command": 3.0}


def test_the_first_preview_counts_from_the_command_without_the_evaluation_before_it() -> None:
    assert phases.first_exploring(TIMELINE, BEGAN) == 51 - 9
    assert phases.first_exploring(TIMELINE[:8], BEGAN) is None


def test_a_phase_has_the_highest_sample_of_its_time() -> None:
    samples = [(BEGAN + at, gb) for at, gb in ((15, 1.0), (52, 40.0), (59, 44.0), (61, 43.0), (72, 66.0), (74, 60.0))]
    found = phases.peaks(samples, phases.owned(TIMELINE, BEGAN, BEGAN + 90))
    assert found == {"reading files": 1.0, "exploring": 44.0, "regenerating": 43.0, "learning": 66.0}


def test_what_neither_rollout_nor_update_took_of_an_iteration_is_fixed(tmp_path: Path) -> None:
    record = {"event": "iteration", "iteration": 0, "seconds": {"total": 31.0}, "busy_seconds": {"learn": 8.5}}
    lines = [{"event": "evaluation"}, record]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    writer = TraceWriter(tmp_path)
    for one in TIMELINE:
        writer.write(one)
    writer.close()
    assert rehearsal.iterations(tmp_path) == [{"rollout": 20.0, "update": 8.5, "fixed": 2.5, "total": 31.0}]


def arguments(model: str, folder: Path, **changes: Any) -> argparse.Namespace:
    given = {"model": model, "work": folder, "out": folder, "tiny": False, "iterations": 3, "micro_batch": 4, "set": []}
    return argparse.Namespace(**given | changes)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("model", rehearsal.RUNS)
def test_the_shipped_configuration_runs_with_fewer_prompts_and_seeds(model: str, tiny: bool, tmp_path: Path) -> None:
    config = rehearsal.configuration(arguments(model, tmp_path, tiny=tiny), "warm")
    check(config)
    rollout = config.rollout
    assert (rollout.prompts, rollout.pool, rollout.keep, rollout.regenerate.micro_batch) == (2, 48, 8, 8)
    assert rollout.preview.prune is not None
    assert (rollout.preview.prune.after, rollout.preview.prune.keep) == (2, 24)
    assert config.run.iterations == 3
    assert config.evaluation.prompts == (8 if tiny else 64)
    assert rehearsal.configuration(arguments(model, tmp_path), "cold").run.iterations == 1


def test_parts_are_kept_and_merged_into_one_table(tmp_path: Path) -> None:
    given = arguments("flux", tmp_path)
    rehearsal.add(given, "make", {"phases": {"making flux": 20.0}})
    run = {"first_exploring": 150.0, "peak_gb": 60.0}
    rehearsal.add(given, "cold", run | {"phases": {"compiling": 90.0}})
    rehearsal.add(given, "warm", run | {"phases": {"compiling": 9.0, "rest": 1.0}, "first_exploring": 50.0})
    rehearsal.add(given, "warm", run | {"phases": {"compiling": 8.0}, "first_exploring": 55.0, "peak_gb": 66.0})
    stored = json.loads((tmp_path / "rehearsal_flux.json").read_text())
    assert stored["phases"] == {"making flux": 20.0, "compiling, cold": 90.0, "compiling": 8.0}
    keys = ("first_exploring_cold", "first_exploring_warm", "peak_gb")
    assert [stored[key] for key in keys] == [150.0, 55.0, 66.0]
    assert stored["conditions"]["configuration"] == "flux1_dev_80gb.yaml"


def test_networks_of_another_size_are_another_rehearsal(tmp_path: Path) -> None:
    rehearsal.add(arguments("flux", tmp_path, tiny=True), "make", {"phases": {"making pickscore": 0.1}})
    rehearsal.add(arguments("flux", tmp_path), "make", {"phases": {"making flux": 20.0}})
    assert json.loads((tmp_path / "rehearsal_flux.json").read_text())["phases"] == {"making flux": 20.0}
