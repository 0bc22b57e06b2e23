"""Answers on their way to the selector."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.dispatch.selector_client import SelectorClient
from actors.workers.selector import Ack
from actors.world import Sent, Tasks
from solrl_ray.scheduling.worker_state import Replacements
from tests.support.iteration_scene import Here, settled
from tests.support.selecting import PLAN, result


class Held(Here):
    """Its answers are on their way until they are let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go = asyncio.Event()
        self.go.set()

    async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
        await self.go.wait()
        return await super().answer(sent, what=what, seconds=seconds)


@pytest.mark.parametrize("is_out", [False, True])
def test_an_answer_to_an_iteration_that_was_dropped_is_forgotten(tmp_path: Path, is_out: bool) -> None:
    """Whether it was on its way to the selector by then, or not."""

    async def test() -> None:
        world: Any = Held(tmp_path)
        async with Tasks() as tasks:
            client = SelectorClient(
                world, tasks, seconds=10.0, replacements=Replacements(0), tell=lambda text, kind="note": None
            )
            first, second, *_ = PLAN.pool_units()
            await client.open(PLAN)
            assert await client.accept(result(first)) == Ack()
            if is_out:
                world.go.clear()
                late = tasks.start(client.accept(result(second)), "an answer")
                await settled()
                dropped = tasks.start(client.drop(PLAN.iteration), "dropping")
                await settled()
                world.go.set()
                await dropped
            else:
                await client.drop(PLAN.iteration)
                late = tasks.start(client.accept(result(second)), "a late answer")
            await asyncio.wait([late], timeout=10.0)
            assert late.cancelled()
            assert client._inbox == []

    asyncio.run(test())
