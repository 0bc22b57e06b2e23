"""What another process is told of a live run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.client.live_run import checked
from solrl_ray.errors import RunError
from solrl_ray.metrics.records import Progress

PROGRESS = Progress(
    run="r",
    state="learning",
    iteration=1,
    iterations=3,
    stages={"learn": (1, 2)},
    train_rewards=(0.5, 0.25),
    heldout=((0, "base", 0.5, 0.1),),
    workers={"explorer-0": "idle"},
    remaining=3.0,
)


def test_progress_of_a_controller_is_taken_as_it_is() -> None:
    assert checked(PROGRESS) == PROGRESS


@pytest.mark.parametrize(
    "answer", ["done", None, {"run": "r"}, SimpleNamespace(run="r"), replace(PROGRESS, iteration="one")]
)
def test_an_answer_of_another_type_is_one_sentence(answer: Any) -> None:
    with pytest.raises(RunError, match=rf"^the run's controller answered with a {type(answer).__name__} "):
        checked(answer)
