"""Ray's world, as far as it needs no Ray: work that blocks, awaited beside everything else."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from actors.ray_world import RayWorld
from solrl_ray.errors import RunError


@pytest.fixture
def world() -> RayWorld:
    """Without actors."""
    return RayWorld.__new__(RayWorld)


def test_what_blocks_is_done_in_another_thread_while_the_rest_goes_on(world: RayWorld) -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        assert go.wait(10.0)
        return threading.get_ident()

    async def test() -> int:
        working = asyncio.create_task(world.blocking(work, "reading a checkpoint", 20.0))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        go.set()
        return await working

    assert asyncio.run(test()) != threading.get_ident()


def test_an_error_of_what_blocks_is_raised_where_it_is_awaited(world: RayWorld) -> None:
    def fail() -> None:
        raise RunError("rank 1 is lost")

    with pytest.raises(RunError, match=r"^rank 1 is lost$"):
        asyncio.run(world.blocking(fail, "the update", 10.0))


def test_a_deadline_inside_of_the_work_is_not_taken_for_its_own(world: RayWorld) -> None:
    def fail() -> None:
        raise TimeoutError("the disk said so")

    with pytest.raises(TimeoutError, match="the disk said so"):
        asyncio.run(world.blocking(fail, "the update", 10.0))


def test_work_that_does_not_end_is_named_while_the_rest_is_looked_after(world: RayWorld) -> None:
    forever, looked = threading.Event(), []

    async def look() -> None:
        while True:
            looked.append(world.now())
            await asyncio.sleep(0.01)

    async def test() -> None:
        looking = asyncio.create_task(look())
        try:
            await world.blocking(forever.wait, "the checkpoint after 3 updates", 0.2)
        finally:
            looking.cancel()

    began = time.monotonic()
    with pytest.raises(RunError, match=r"^the checkpoint after 3 updates passed its deadline of 0\.2 s$"):
        asyncio.run(test())
    assert time.monotonic() - began < 10.0, "the end of the loop does not wait for it"
    assert len(looked) > 1
    forever.set()
