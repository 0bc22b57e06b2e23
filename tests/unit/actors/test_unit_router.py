"""Units on their way to workers and back: what a requester gets, and what happens to units without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest

from actors.dispatch.unit_router import Call, Reply, UnitRouter
from solrl_ray.config.fleet import FleetConfig
from solrl_ray.errors import RewardError, RunError
from solrl_ray.records import WorkUnit
from tests.support.iteration_scene import Watching, settled

HOLDS = "old", 0


def unit(prompt_id: str) -> WorkUnit:
    return WorkUnit(stage="regenerate", iteration=0, revision=0, prompt_id=prompt_id, indices=(0, 1))


A, B, C = unit("a"), unit("b"), unit("c")


@dataclass(frozen=True)
class Value:
    unit: WorkUnit
    seconds: float = 1.0
    started: float = 0.0


class Clock:
    seconds = 100.0

    def now(self) -> float:
        return self.seconds


class Hand:
    """A worker that answers when the test wants it."""

    pool, is_alone = "regenerators", False

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: list[tuple[WorkUnit, Call]] = []

    def give(self, unit: WorkUnit, call: Call) -> None:
        self.given.append((unit, call))

    @property
    def units(self) -> list[WorkUnit]:
        return [unit for unit, _ in self.given]


class Scene:
    """A router whose workers have one unit at a time."""

    def __init__(self) -> None:
        self.clock: Any = Clock()
        self.watching: Any = Watching()
        self.retired: list[tuple[str, str]] = []
        fleet = FleetConfig(max_inflight=1, strikes=2)
        self.router = UnitRouter(self.clock, fleet, self.watching, lambda *said: self.retired.append(said))

    async def worker(self, name: str) -> Hand:
        hand = Hand(name)
        self.router.ready(hand, HOLDS)
        await settled()
        return hand

    async def requested(self, *units: WorkUnit) -> list[asyncio.Task[Reply]]:
        """Requests, in this order."""
        tasks = [asyncio.create_task(self.request(unit, order)) for order, unit in enumerate(units)]
        await settled()
        return tasks

    async def request(self, unit: WorkUnit, order: int = 0) -> Reply:
        call = Call("regenerate", (unit, f"prompt {unit.prompt_id}"), parts=2)
        return await self.router.request(unit, call, pool="regenerators", order=(order,))

    async def answer(self, hand: Hand, unit: WorkUnit, large: Any = None) -> None:
        self.router.answered(hand, unit, Value(unit), large)
        await settled()


def scene(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is given a scene."""

    def run() -> None:
        async def acted() -> None:
            await test(Scene())

        asyncio.run(acted())

    run.__name__ = getattr(test, "__name__", "")
    return run


def scene_with(test: Callable[[Scene, str], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    """The same for a test with a parameter, `end`."""

    def run(end: str) -> None:
        scene(lambda it: test(it, end))()

    run.__name__ = test.__name__
    return run


@scene
async def test_a_worker_is_given_the_call_and_its_answer_is_the_reply(scene: Scene) -> None:
    (reply,) = await scene.requested(A)
    hand = await scene.worker("regenerator-0")
    assert hand.given == [(A, Call("regenerate", (A, "prompt a"), 2))]
    assert scene.router.units_of("regenerator-0") == [A]
    scene.clock.seconds += 7.0
    await scene.answer(hand, A, large="a reference")
    assert await reply == Reply("regenerator-0", Value(A), "a reference", began=100.0, requeued=0)
    assert scene.router.units_of("regenerator-0") == []


@scene
async def test_units_of_a_lost_worker_go_to_another_one_which_the_reply_counts(scene: Scene) -> None:
    first, second = await scene.requested(A, B)
    gone = await scene.worker("regenerator-0")
    assert gone.units == [A]
    scene.clock.seconds += 5.0
    assert scene.router.lost("regenerator-0") == 1
    other = await scene.worker("regenerator-0.1")
    assert other.units == [A]  # before the later one
    await scene.answer(other, A)
    await scene.answer(other, B)
    assert (await first).requeued == 1
    assert ((await first).worker, (await first).began) == ("regenerator-0.1", 100.0)  # when it was handed out first
    assert ((await second).requeued, (await second).began) == (0, 105.0)
    assert scene.router.lost("regenerator-0.1") == 0
    assert scene.watching.said == []  # its pool reports a loss


@scene
async def test_a_refused_answers_unit_is_asked_for_again_in_its_place(scene: Scene) -> None:
    first, *later = await scene.requested(A, B, C)
    hand = await scene.worker("regenerator-0")
    other = await scene.worker("regenerator-1")
    assert (hand.units, other.units) == ([A], [B])
    scene.router.nonsense(hand, A, "NaN")
    await settled()
    assert hand.units == [A, A]  # before the third
    assert scene.watching.said == [f"{A.describe()} is repeated; strike 1 of 2 for regenerator-0: NaN"]
    await scene.answer(hand, A)
    assert (await first).requeued == 1
    assert hand.units == [A, A, C]
    await scene.answer(other, B)
    await scene.answer(hand, C)
    assert [(await each).requeued for each in later] == [0, 0]
    assert scene.retired == []


@scene
async def test_who_refuses_an_answer_strikes_and_asks_again(scene: Scene) -> None:
    """As an open iteration whose selector refuses an answer."""

    async def asks() -> Reply:
        refused = await scene.request(A)
        scene.router.strike(refused.worker, A, "refused")
        return await scene.request(A)

    asking = asyncio.create_task(asks())
    (later,) = await scene.requested(B)
    hand = await scene.worker("regenerator-0")
    await scene.answer(hand, A)
    if hand.units[-1] == B:  # the slot was free before the answer was judged
        await scene.answer(hand, B)
    assert hand.units[-1] == A
    assert scene.watching.said == [f"{A.describe()} is repeated; strike 1 of 2 for regenerator-0: refused"]
    await scene.answer(hand, A)
    assert (await asking).worker == "regenerator-0"
    if not later.done():
        await scene.answer(hand, B)
    await later


@scene
async def test_an_answer_to_another_unit_is_a_strike_and_the_last_one_has_the_worker_replaced(scene: Scene) -> None:
    (reply,) = await scene.requested(A)
    hand = await scene.worker("regenerator-0")
    stale = replace(A, revision=3)
    for strike in (1, 2):
        scene.router.answered(hand, A, Value(stale), None)
        await settled()
        assert hand.units == [A] * (1 + strike)
    said = f"regenerator-0 was given {A.describe()} of revision 0 and answered {A.describe()} of revision 3"
    assert scene.retired == [("regenerator-0", f"strike 2: {said}")]
    await scene.answer(hand, A)
    assert (await reply).requeued == 2


@scene
async def test_nonsense_of_a_second_worker_for_the_same_unit_is_raised_where_it_was_requested(scene: Scene) -> None:
    (reply,) = await scene.requested(A)
    hand = await scene.worker("regenerator-0")
    scene.router.nonsense(hand, A, "NaN")
    scene.router.lost("regenerator-0")
    other = await scene.worker("regenerator-1")
    assert other.units == [A]
    scene.router.nonsense(other, A, "NaN")
    with pytest.raises(RunError, match=r"was refused from regenerator-0 and from regenerator-1: NaN$"):
        await reply


@scene
async def test_nonsense_of_a_worker_that_is_alone_ends_the_request_unless_it_was_right_before(scene: Scene) -> None:
    right, wrong = await scene.requested(A, B)
    hand = await scene.worker("regenerator-0")
    hand.is_alone = True  # type: ignore[misc]
    await scene.answer(hand, A)
    scene.router.nonsense(hand, B, "NaN")
    await settled()
    await scene.answer(hand, B)
    assert ((await right).requeued, (await wrong).requeued) == (0, 1)
    scene.router.lost("regenerator-0")
    (reply,) = await scene.requested(C)
    never = await scene.worker("regenerator-1")
    never.is_alone = True  # type: ignore[misc]
    scene.router.nonsense(never, C, "NaN")
    with pytest.raises(RunError, match=r"from regenerator-1, the only worker .* never gave a valid answer: NaN$"):
        await reply


@scene
async def test_an_error_of_a_unit_is_raised_where_it_was_requested_and_its_worker_goes_on(scene: Scene) -> None:
    first, second = await scene.requested(A, B)
    hand = await scene.worker("regenerator-0")
    scene.router.failed(hand, A, RewardError("no tokenizer"))
    with pytest.raises(RewardError, match=r"^no tokenizer$"):
        await first
    await settled()
    assert hand.units == [A, B]
    await scene.answer(hand, B)
    await second


@scene
async def test_a_cancelled_request_is_handed_to_nobody_and_a_late_answer_to_it_is_ignored(scene: Scene) -> None:
    out, waiting, last = await scene.requested(A, B, C)
    hand = await scene.worker("regenerator-0")
    assert hand.units == [A]
    out.cancel()
    waiting.cancel()
    await settled()
    other = await scene.worker("regenerator-1")
    assert (hand.units, other.units) == ([A], [C])
    await scene.answer(hand, A)
    assert hand.units == [A]
    await scene.answer(other, C)
    assert (await last).worker == "regenerator-1"
    for end in (scene.router.nonsense, scene.router.failed):
        (late,) = await scene.requested(A)
        late.cancel()
        await settled()
        end(hand, A, RunError("late"))  # type: ignore[arg-type]
    assert scene.router.lost("regenerator-0") == 0
    assert out.cancelled()


@pytest.mark.parametrize("end", ["answered", "failed", "nonsense"])
@scene_with
async def test_a_late_answer_to_a_cancelled_unit_does_not_end_a_request_of_the_same_name(
    scene: Scene, end: str
) -> None:
    """An id has no revision: an evaluation that was cancelled may be made again with another one."""
    (cancelled,) = await scene.requested(A)
    hand = await scene.worker("regenerator-0")
    cancelled.cancel()
    await settled()
    newer = replace(A, revision=1)
    (reply,) = await scene.requested(newer)
    if end == "answered":
        scene.router.answered(hand, A, Value(A), None)
    else:
        getattr(scene.router, end)(hand, A, RunError("late"))
    await settled()
    assert not reply.done()
    scene.router.ready(hand, ("old", 1))
    await settled()
    assert hand.units == [A, newer]
    await scene.answer(hand, newer)
    assert (await reply).value == Value(newer)
    assert (await reply).requeued == 0


@scene
async def test_a_lost_worker_does_not_bring_back_a_cancelled_request(scene: Scene) -> None:
    cancelled, kept = await scene.requested(A, B)
    hand = await scene.worker("regenerator-0")
    other = await scene.worker("regenerator-1")
    assert (hand.units, other.units) == ([A], [B])
    cancelled.cancel()
    await settled()
    assert (scene.router.lost("regenerator-0"), scene.router.lost("regenerator-1")) == (0, 1)
    last = await scene.worker("regenerator-2")
    assert last.units == [B]
    await scene.answer(last, B)
    await kept


@scene
async def test_a_unit_is_requested_once_at_a_time(scene: Scene) -> None:
    (first,) = await scene.requested(A)
    with pytest.raises(RunError, match=r" was requested twice$"):
        await scene.request(A)
    hand = await scene.worker("regenerator-0")
    assert hand.units == [A]  # the first request is as it was
    await scene.answer(hand, A)
    await first
    (again,) = await scene.requested(A)
    await scene.answer(hand, A)
    assert (await again).requeued == 0


@scene
async def test_a_worker_that_is_not_ready_keeps_its_unit_and_gets_no_other(scene: Scene) -> None:
    first, second = await scene.requested(A, B)
    hand = await scene.worker("regenerator-0")
    scene.router.not_ready(hand)
    await scene.answer(hand, A)
    assert hand.units == [A]
    scene.router.ready(hand, HOLDS)
    await settled()
    assert hand.units == [A, B]
    await scene.answer(hand, B)
    await asyncio.gather(first, second)
