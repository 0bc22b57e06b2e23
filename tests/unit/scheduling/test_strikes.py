"""Refused answers: the worker's fault, or the run's."""

from __future__ import annotations

import pytest

from solrl_ray.errors import RunError
from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.strikes import Strikes


def unit(prompt_id: str) -> WorkUnit:
    return WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=prompt_id, indices=(0, 1))


A, B = unit("a"), unit("b")


def test_each_workers_refused_answers_are_counted_over_all_units() -> None:
    strikes = Strikes()
    assert [strikes.refuse("e-0", each, "NaN", alone=False) for each in (A, A, B)] == [1, 2, 3]
    assert strikes.refuse("e-1", unit("c"), "NaN", alone=False) == 1


def test_a_second_worker_with_nonsense_for_a_unit_is_the_runs_fault() -> None:
    strikes = Strikes()
    strikes.refuse("e-0", A, "NaN", alone=False)
    for second in ("e-1", "e-0.1"):  # a replacement is another worker
        with pytest.raises(RunError, match=rf"^{A.describe()[:7]}.* was refused from e-0 and from {second}: NaN$"):
            strikes.refuse(second, A, "NaN", alone=False)
    assert strikes.refuse("e-1", B, "NaN", alone=False) == 1


def test_a_refusal_is_forgotten_once_an_answer_to_the_unit_was_accepted() -> None:
    strikes = Strikes()
    strikes.refuse("e-0", A, "NaN", alone=False)
    strikes.refuse("e-0", B, "NaN", alone=False)
    strikes.accepted(A)
    strikes.accepted(unit("c"))
    assert strikes.refuse("e-1", A, "NaN", alone=False) == 1  # its group was lost later, and is made again
    with pytest.raises(RunError, match="from e-0 and from e-1"):
        strikes.refuse("e-1", B, "NaN", alone=False)


def test_a_worker_that_is_alone_and_was_never_right_is_the_runs_fault() -> None:
    strikes = Strikes()
    with pytest.raises(RunError, match=r"from e-0, the only worker of its pool, which never gave a valid answer: NaN$"):
        strikes.refuse("e-0", A, "NaN", alone=True)
    strikes.answered("e-0")
    assert strikes.refuse("e-0", A, "NaN", alone=True) == 1
