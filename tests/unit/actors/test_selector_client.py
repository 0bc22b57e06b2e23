"""Answers on their way to the selector."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from actors.dispatch.selector_client import SelectorClient
from actors.workers.selector import Ack
from actors.world import Tasks
from solrl_ray.scheduling.replacements import Replacements
from tests.support.selecting import PLAN, result
from tests.unit.actors.test_open_iteration import Here


def test_an_answer_waits_for_its_iteration_and_is_forgotten_with_it(tmp_path: Path) -> None:
    acks: list[Ack] = []

    async def test() -> None:
        world: Any = Here(tmp_path)
        async with Tasks() as tasks:
            client = SelectorClient(
                world,
                tasks,
                seconds=10.0,
                replacements=Replacements(0),
                tell=lambda text: None,
                reopened=lambda iteration, opened: None,
            )
            first, second, *_ = PLAN.pool_units()
            client.accept(result(first), acks.append)
            await asyncio.sleep(0.01)
            assert (len(client._inbox), acks) == (1, [])
            await client.open(PLAN)
            await asyncio.sleep(0.01)
            assert (client._inbox, acks) == ([], [Ack()])
            await client.drop(PLAN.iteration)
            client.accept(result(second), acks.append)
            await asyncio.sleep(0.01)
            assert (client._inbox, acks) == ([], [Ack()])

    asyncio.run(test())
