"""Whose turn it is on a shared GPU: learners, explorers, regenerators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from actors.fleet.turns import Turns

from solrl_ray.config.fleet import FleetConfig, Learners, WorkerPool

SHARE = {"num_gpus": 0.3}


class Pool:
    """Wants the turn, or is busy, as the test says; it gives memory back when `gate` is set."""

    def __init__(self) -> None:
        self.wants_turn, self.is_busy = False, False
        self.has_memory = False
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def is_quiet(self) -> bool:
        return not (self.wants_turn or self.is_busy)

    def wake(self) -> None:
        self.has_memory = True

    async def release_gpu_memory(self) -> None:
        await self.gate.wait()
        self.has_memory = False


class Scene:
    def __init__(self, sharing: Any) -> None:
        fleet = FleetConfig(
            explorers=WorkerPool(**SHARE), regenerators=WorkerPool(**SHARE), learners=Learners(**SHARE), sharing=sharing
        )
        self.explorers, self.regenerators = Pool(), Pool()
        self.turns = Turns(fleet, {"explorers": self.explorers, "regenerators": self.regenerators})

    def who(self) -> str:
        """Whose turn it is; with everybody's memory that has any."""
        names = [name for name in ("explorers", "regenerators") if self.turns.turn_of(name).is_set()]
        there = [name for name in ("explorers", "regenerators") if getattr(self, name).has_memory]
        assert there == names or not names, (there, names)
        return " and ".join(names)

    async def settle(self) -> str:
        self.turns.look()
        for _ in range(10):
            await asyncio.sleep(0)
        return self.who()


def run(sharing: str, test: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def opened() -> None:
        scene = Scene(sharing)
        passing = asyncio.ensure_future(scene.turns.keep_passing_on())
        await test(scene)
        assert not passing.done()
        passing.cancel()

    asyncio.run(opened())


def test_a_stage_has_the_turn_until_it_is_quiet_and_the_other_one_wants_it() -> None:
    async def test(scene: Scene) -> None:
        explorers, regenerators = scene.explorers, scene.regenerators
        explorers.wants_turn = regenerators.wants_turn = True
        assert await scene.settle() == ""  # the learners have the first one
        await scene.turns.open()
        assert await scene.settle() == "explorers"
        explorers.wants_turn, explorers.is_busy = False, True
        assert await scene.settle() == "explorers"
        explorers.is_busy = False
        assert await scene.settle() == "regenerators"
        regenerators.wants_turn = False
        assert await scene.settle() == "regenerators"  # nobody wants it
        explorers.wants_turn = True
        assert await scene.settle() == "explorers"

    run("one_at_a_time", test)


def test_nobody_has_a_turn_before_memory_is_free_and_learners_do_not_come_between() -> None:
    async def test(scene: Scene) -> None:
        explorers, regenerators = scene.explorers, scene.regenerators
        explorers.wants_turn = True
        await scene.turns.open()
        assert await scene.settle() == "explorers"
        explorers.wants_turn, regenerators.wants_turn = False, True
        explorers.gate.clear()
        assert await scene.settle() == ""
        learners = asyncio.ensure_future(scene.turns.take())
        assert await scene.settle() == ""
        assert not learners.done()
        explorers.gate.set()
        assert await scene.settle() == ""
        assert learners.done()
        assert not regenerators.has_memory
        await scene.turns.open()
        assert await scene.settle() == "regenerators"

    run("one_at_a_time", test)


@pytest.mark.parametrize(("sharing", "first"), [("lay_down", ""), ("keep", "explorers and regenerators")])
def test_explorers_and_regenerators_together_need_no_reason_for_their_turn(sharing: str, first: str) -> None:
    async def test(scene: Scene) -> None:
        if sharing == "keep":
            scene.explorers.wake(), scene.regenerators.wake()
        assert scene.who() == first
        await scene.turns.open()
        assert scene.who() == "explorers and regenerators"
        await scene.turns.take()
        assert scene.turns.turn_of("explorers").is_set() == (sharing == "keep")
        assert not scene.explorers.has_memory
        assert not scene.regenerators.has_memory

    run(sharing, test)


def test_who_shares_no_gpu_always_has_a_turn() -> None:
    turns = Turns(FleetConfig(sharing="one_at_a_time"), {})
    assert turns.turn_of("explorers").is_set()
    assert turns.turn_of("regenerators").is_set()
