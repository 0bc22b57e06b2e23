"""Actors that share one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import one_process
import torch

from tests.support.small import small_config


class Computes:
    """As workers do, it sets its threads when it starts."""

    def __init__(self, threads: int) -> None:
        self._wanted = threads

    def start(self) -> None:
        torch.set_num_threads(self._wanted)

    def threads(self) -> int:
        return torch.get_num_threads()


def test_each_actor_computes_with_its_own_threads(tmp_path: Path, own_threads: None) -> None:
    """On which the last bits of a result depend."""
    world = one_process.OneProcessWorld(small_config(tmp_path, "threads"), tmp_path)

    async def asked() -> list[int]:
        actors = [Computes(1), Computes(2), Computes(1)]
        for actor in actors:
            await world.answer(world.send(actor, "start"), what="start", seconds=1.0)
        return [await world.answer(world.send(each, "threads"), what="threads", seconds=1.0) for each in actors]

    assert asyncio.run(asked()) == [1, 2, 1]
