"""What a run goes back to after a collapse, and when, from its records and checkpoints alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.monitoring.telemetry import Telemetry
from actors.ray_world import RayWorld
from actors.training.checkpoints import CheckpointWriter
from solrl_ray.errors import RunError
from solrl_ray.learning.state import LearnerState
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.storage.run_folder import RunFolder
from tests.support import made_runs
from tests.support.made_configs import changed

PARTS = ("default", "old", "ema", "exp_avg", "exp_avg_sq")
FELL = {"by": 0.2, "allowed": 0.1, "best": 2.0}
"""Of an evaluation, whose best one was after 2 updates."""


def state(updates: int) -> LearnerState:
    """Each of its tensors has its own number: 10 × the updates, and one more for each part."""
    parts: dict[str, Any] = {
        part: {"block.lora_B": torch.tensor([10.0 * updates + place])} for place, part in enumerate(PARTS)
    }
    return LearnerState(updates=updates, steps=3 * updates, **parts)


def evaluated(updates: int, policy: str = "ema", **fall: float) -> EvaluationMetrics:
    return replace(made_runs.evaluation(updates, policy, {"p": (0.5,)}), fall=fall)


def back(
    path: Path,
    updates: int,
    evaluations: list[EvaluationMetrics],
    *,
    rollbacks: tuple[int, ...] = (),
    on_collapse: str = "rollback",
) -> tuple[tuple[int, LearnerState] | None, tuple[str, ...]]:
    """What the run goes back to when update `updates` is made, and what the user is told.

    `rollbacks`: iterations whose records have one.
    """
    config = changed(made_runs.config(9), run={"on_collapse": on_collapse})
    folder, world = RunFolder(path), RayWorld.__new__(RayWorld)  # of which this needs nothing that needs Ray
    for each in (2, 4):
        state(each).save(folder.checkpoint(each))
    telemetry = Telemetry(config, folder, world)
    telemetry.evaluations = evaluations
    telemetry.iterations = [back_at(number, number in rollbacks) for number in range(updates - 1)]
    nobody: Any = None
    found = asyncio.run(CheckpointWriter(config, folder, world, telemetry, nobody).gone_back_to(updates))
    return found, telemetry.progress().messages


def back_at(number: int, went: bool) -> IterationMetrics:
    return replace(made_runs.iteration(number), rollback=0 if went else None)  # to the base


def test_after_a_fall_the_best_checkpoint_is_the_state_after_the_next_update(tmp_path: Path) -> None:
    found, said = back(tmp_path, 5, [evaluated(0, "base"), evaluated(2), evaluated(4, **FELL)])
    assert found is not None
    best, gone = found
    assert (best, gone.updates, gone.steps, gone.rollbacks) == (2, 5, 6, 1)
    assert [getattr(gone, part)["block.lora_B"].item() for part in PARTS] == [20.0, 21.0, 22.0, 23.0, 24.0]
    assert any("the policy after 2 updates, with 0.5 of the configured learning rate" in text for text in said)


def test_each_time_the_step_is_half_of_that_before(tmp_path: Path) -> None:
    records = [evaluated(2), evaluated(4, **FELL), evaluated(6, **FELL)]
    found, said = back(tmp_path, 7, records, rollbacks=(4,))
    assert found is not None
    assert found[1].rollbacks == 2
    assert any("with 0.25 of" in text for text in said)


@pytest.mark.parametrize("updates", [6, 7])
def test_an_older_fall_is_not_gone_back_from_again(tmp_path: Path, updates: int) -> None:
    """Evaluations are after every third update: one update later the run has gone back already."""
    found, said = back(tmp_path, updates, [evaluated(1), evaluated(4, **FELL)], rollbacks=(4,))
    assert (found, said) == (None, ())


def test_a_fall_that_was_made_up_for_is_none_and_neither_is_that_of_another_policy(tmp_path: Path) -> None:
    assert back(tmp_path, 7, [evaluated(2), evaluated(4, **FELL), evaluated(6)])[0] is None
    assert back(tmp_path, 5, [evaluated(2), evaluated(4), evaluated(4, "base", **FELL)])[0] is None
    assert back(tmp_path, 1, [])[0] is None


def test_a_fall_is_only_warned_of_or_ends_the_run_as_configured(tmp_path: Path) -> None:
    records = [evaluated(2), evaluated(4, **FELL)]
    assert back(tmp_path, 5, records, on_collapse="warn") == (None, ())
    with pytest.raises(RunError, match=r"^run\.on_collapse is stop: held-out reward after 4 updates"):
        back(tmp_path, 5, records, on_collapse="stop")


def test_a_best_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^run\.on_collapse is rollback, .* that checkpoint cannot be read: .*000003"):
        back(tmp_path, 5, [evaluated(3), evaluated(4, by=0.2, allowed=0.1, best=3.0)])


def test_of_equal_evaluations_the_checkpoint_of_the_first_is_kept_and_that_of_the_base(tmp_path: Path) -> None:
    config, folder, world = made_runs.config(9), RunFolder(tmp_path), RayWorld.__new__(RayWorld)
    telemetry = Telemetry(config, folder, world)
    high, low = ({"p": (value,)} for value in (0.9, 0.4))
    telemetry.evaluations = [
        made_runs.evaluation(0, "base", high),
        *(made_runs.evaluation(updates, "ema", low) for updates in (2, 4)),
    ]
    nobody: Any = None
    writer = CheckpointWriter(config, folder, world, telemetry, nobody)
    assert writer._best == {0, 2}
