"""What the controller notes of an iteration's stages."""

from __future__ import annotations

import pytest

from actors.dispatch.open_iteration import OpenIteration, RolloutResult, StageClock
from actors.workers.selector import Opened
from solrl_ray.records import Prompt
from solrl_ray.scheduling.iteration_state import IterationPlan


@pytest.mark.parametrize(
    ("staleness", "regenerated", "expected"),
    [
        (0, 14.0, {"explore": 10.0, "regenerate": 6.0}),
        (1, 14.0, {"ahead": 4.0, "explore": 6.0, "regenerate": 6.0}),  # the revision came while it was explored
        (1, 25.0, {"ahead": 10.0, "explore": 0.0, "regenerate": 6.0}),  # and after it was
        (1, 5.0, {"ahead": 0.0, "explore": 10.0, "regenerate": 6.0}),  # it was there first, as after a resume
        (1, None, {"ahead": 10.0, "explore": 0.0, "regenerate": 0.0}),  # all groups were there
    ],
)
def test_what_was_explored_before_the_iterations_revision_was_there_is_told_apart(
    staleness: int, regenerated: float | None, expected: dict[str, float]
) -> None:
    end = regenerated + 6.0 if regenerated is not None else 0.0
    clocks = {"explore": StageClock(10.0, 20.0), "regenerate": StageClock(regenerated, end)}
    assert RolloutResult([], [], [], clocks, staleness=staleness).walls == pytest.approx(expected)


def test_groups_are_offered_in_prompt_order_and_once_as_far_as_none_is_missing() -> None:
    plan = IterationPlan(iteration=0, revision=0, prompt_ids=tuple("abcd"), pool=2, keep=2, micro_batch=2)
    prompts = [Prompt(id=key, text="") for key in "abcd"]
    this = OpenIteration(plan, prompts, dict(zip("abcd", "1234", strict=True)), Opened(groups=(), candidates=0))
    offered = []
    for key in "bacd":
        this.groups[key] = key.upper()
        offered.append(this.offer())
    assert offered == [(0, [], []), (0, ["A", "B"], ["1", "2"]), (2, ["C"], ["3"]), (3, ["D"], ["4"])]
    assert this.offer() == (4, [], [])
