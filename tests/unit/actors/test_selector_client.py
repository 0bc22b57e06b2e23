"""Answers on their way to the selector."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from actors.dispatch.selector_client import SelectorClient
from actors.workers.selector import Ack
from actors.world import Tasks
from solrl_ray.scheduling.replacements import Replacements
from tests.support.iteration_scene import Here
from tests.support.selecting import PLAN, result


def test_an_answer_to_an_iteration_that_was_dropped_is_forgotten(tmp_path: Path) -> None:
    async def test() -> None:
        world: Any = Here(tmp_path)
        async with Tasks() as tasks:
            client = SelectorClient(world, tasks, seconds=10.0, replacements=Replacements(0), tell=lambda text: None)
            first, second, *_ = PLAN.pool_units()
            await client.open(PLAN)
            assert await client.accept(result(first)) == Ack()
            await client.drop(PLAN.iteration)
            late = tasks.start(client.accept(result(second)), "a late answer")
            await asyncio.wait([late])
            assert late.cancelled()
            assert client._inbox == []

    asyncio.run(test())
