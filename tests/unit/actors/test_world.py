"""Tasks that belong together, and answers that depend on each other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors import world
from actors.world import Process, Sent, Tasks, all_answers
from solrl_ray.errors import PeerGone, RunError, UserError, WorkerGone


async def fails(error: Exception) -> None:
    raise error


async def notes(said: list[str], word: str) -> None:
    """Waits for ever, and says so when it is ended."""
    try:
        await asyncio.sleep(3600.0)
    finally:
        said.append(word)


def test_the_end_of_a_run_ends_its_tasks() -> None:
    said: list[str] = []

    async def test() -> str:
        async with Tasks() as tasks:
            for word in ("watch", "write"):
                tasks.start(notes(said, word), word)
            await asyncio.sleep(0.0)
            return "done"

    assert asyncio.run(asyncio.wait_for(test(), 10.0)) == "done"
    assert sorted(said) == ["watch", "write"]


def test_the_first_error_of_a_task_ends_the_others_and_is_raised_as_it_is() -> None:
    said: list[str] = []

    async def test() -> None:
        async with Tasks() as tasks:
            tasks.start(notes(said, "watch"), "watch")
            await asyncio.sleep(0.0)
            tasks.start(fails(RunError("a worker was lost")), "the life of explorer-0")
            await asyncio.sleep(3600.0)

    with pytest.raises(RunError, match=r"^a worker was lost$"):
        asyncio.run(asyncio.wait_for(test(), 10.0))
    assert said == ["watch"]


def test_an_error_of_the_run_itself_is_raised_as_it_is() -> None:
    async def test() -> None:
        async with Tasks() as tasks:
            tasks.start(asyncio.sleep(3600.0), "a wait")
            raise UserError("no such prompts")

    with pytest.raises(UserError, match=r"^no such prompts$"):
        asyncio.run(asyncio.wait_for(test(), 10.0))


def test_a_task_that_is_begun_by_one_that_ends_ends_too() -> None:
    """As when a worker is lost in the moment in which its run ends."""

    async def test() -> None:
        async with Tasks() as tasks:

            async def replaces() -> None:
                try:
                    await asyncio.sleep(3600.0)
                except asyncio.CancelledError:
                    tasks.start(asyncio.sleep(3600.0), "the life of explorer-0.1")

            tasks.start(replaces(), "the life of explorer-0")
            await asyncio.sleep(0.0)

    asyncio.run(asyncio.wait_for(test(), 10.0))


class Answers:
    """Answers each call after so many seconds, or with that error."""

    async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
        after, result = sent.answer
        await asyncio.sleep(after)
        if isinstance(result, Exception):
            raise result
        return result


async def answered(*calls: tuple[float, Any]) -> list[Any]:
    answers: Any = Answers()
    return await all_answers(answers, [Sent(call) for call in calls], what="update", seconds=10.0)


def test_answers_come_in_the_order_of_the_calls() -> None:
    assert asyncio.run(answered((0.02, "first"), (0.0, "second"))) == ["first", "second"]
    assert asyncio.run(answered()) == []


def test_a_loss_is_raised_rather_than_what_the_others_made_of_it() -> None:
    made_of_it, loss = RunError("rank 0: the connection was closed"), WorkerGone("update", "rank 1 is gone")
    with pytest.raises(WorkerGone, match="rank 1 is gone"):
        asyncio.run(answered((0.0, made_of_it), (0.05, loss), (3600.0, "never")))


CUT = PeerGone("learning on rank 0", "the connection to another rank of its group is closed")


def test_ranks_that_lost_each_other_are_a_loss_and_what_ray_says_of_it_later_is_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "NOTICED", 0.3)
    with pytest.raises(WorkerGone, match="rank 1 is gone"):
        asyncio.run(answered((0.0, CUT), (0.05, WorkerGone("update", "rank 1 is gone"))))
    for other in ((0.0, CUT), (3600.0, "never")):
        with pytest.raises(WorkerGone, match=r"^update failed: learning on rank 0 failed: the connection to another"):
            asyncio.run(answered((0.0, CUT), other))


def test_an_error_is_raised_when_no_loss_has_explained_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "GRACE", 0.1)
    with pytest.raises(RunError, match="out of memory"):
        asyncio.run(answered((0.0, RunError("out of memory")), (3600.0, "never")))


LOSS = WorkerGone("update", "rank 0 is gone")


def test_calls_that_wait_for_one_that_is_lost_are_ended_before_they_are_given_up() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        waiting, said = loop.create_future(), list[str]()

        class Waits:
            async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
                return await sent.answer

        def on_loss() -> None:
            said.append("aborted")
            waiting.set_exception(PeerGone("learning on rank 1", "another rank of its group is lost"))

        async def lost() -> None:
            raise LOSS

        cards, answers = (Process("card-0"), Process("card-1")), Waits()
        calls = [Sent(call, process=card) for call, card in zip((lost(), waiting), cards, strict=True)]
        with pytest.raises(WorkerGone, match="rank 0 is gone"):
            await all_answers(answers, calls, what="update", seconds=10.0, on_loss=on_loss)  # type: ignore[arg-type]
        assert said == ["aborted"]
        assert [card.lost for card in cards] == [True, False]

    asyncio.run(asyncio.wait_for(test(), 10.0))


@pytest.mark.parametrize(
    ("second", "lost"),
    [
        ((0.2, RunError("the connection was closed")), False),  # it lives, and its card has other roles
        ((0.2, "an answer"), False),
        ((0.2, LOSS), True),
        ((3600.0, "never"), True),
    ],
)
def test_after_a_loss_a_card_that_answers_lives_on_and_one_that_hangs_is_lost(
    second: tuple[float, Any], lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "GRACE", 0.5)
    cards, answers = (Process("card-0"), Process("card-1")), Answers()
    calls = [Sent(call, process=card) for call, card in zip(((0.0, LOSS), second), cards, strict=True)]
    with pytest.raises(WorkerGone, match="rank 0 is gone"):
        asyncio.run(all_answers(answers, calls, what="update", seconds=10.0))  # type: ignore[arg-type]
    assert [card.lost for card in cards] == [True, lost]


def test_a_deadline_counts_the_calls_that_are_ahead_in_the_same_process() -> None:
    card, other = Process("card-0"), Process("card-1")
    with card.waited_for(10.0) as first, other.waited_for(7.0) as elsewhere:
        with card.waited_for(5.0) as second, card.waited_for(None) as without, card.waited_for(3.0) as last:
            assert (first, second, without, last, elsewhere) == (10.0, 15.0, None, 18.0, 7.0)
        with card.waited_for(1.0) as third:
            assert third == 11.0
    with card.waited_for(2.0) as later:
        assert later == 2.0
