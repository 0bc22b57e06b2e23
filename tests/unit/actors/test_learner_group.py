"""A learner group whose ranks move or are lost while they have been offered samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.training.learner_group import LearnerGroup
from solrl_ray.config.schema import Config
from solrl_ray.errors import InputGone, PeerGone
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.scheduling.worker_state import Replacements
from solrl_ray.weight_sync.checksums import stamps
from tests.simulated import players, virtual_clock
from tests.simulated.faults import Fault
from tests.simulated.memory_disk import MemoryDisk
from tests.simulated.world import SimulatedWorld
from tests.support.small import small_config

OFFER = 8
"""The first rank's first offer comes after start, node, join of both ranks, and the address of one."""

STATE = 8
"""After start, node, address, join, feed, update and shard."""


class Rank:
    """Learns nothing."""

    def start(self) -> str:
        return "host"

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def join(self, address: str, port: int, one_host: bool) -> None: ...

    def offer(self, iteration: int, sizes: list[int], first: int, groups: list[Any], embeddings: list[Any]) -> None: ...

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None: ...

    def update(self, iteration: int) -> str:
        return f"update {iteration}"


class OnGpu(players.Learner):
    """Makes other bits in each process."""

    def update(self, iteration: int) -> UpdateMetrics:
        self._step(torch.rand(()).item())
        return super().update(iteration)


class CutOff(Rank):
    """The first update of one loses the connection to the others; all processes live."""

    cuts = 0

    def update(self, iteration: int) -> str:
        CutOff.cuts += 1
        if CutOff.cuts == 1:
            raise PeerGone("learning", "the connection to another rank of its group is closed")
        return super().update(iteration)


async def nothing(*_: Any) -> Any:
    return None


@asynccontextmanager
async def started(
    config: Config,
    rank: Callable[[], Rank | OnGpu],
    replacements: Replacements,
    *faults: Fault,
    cards: int = 0,
    **asked: Callable[..., Any],
) -> AsyncIterator[tuple[LearnerGroup, Any]]:
    """A group in its world; who is left of it is killed at the end."""
    world: Any = SimulatedWorld(lambda role, name: rank(), MemoryDisk(), faults=faults, cards=cards)
    given = {"last_state": nothing, "supply": nothing} | asked
    group = LearnerGroup(config, world, replacements=replacements, tell=lambda text, kind="note": None, **given)
    await group.spawn()
    await group.start(None)
    yield group, world
    for actor in world.actors:
        world.kill(actor)
    await asyncio.sleep(0.0)


@pytest.mark.parametrize(("moves", "spent"), [(True, 0), (False, 1)], ids=["its node leaves", "a rank hangs"])
def test_what_was_offered_to_ranks_that_are_gone_is_not_waited_for(tmp_path: Path, moves: bool, spent: int) -> None:
    config, replacements = small_config(tmp_path, "ranks", "learner.world_size=2"), Replacements(5)

    async def test() -> None:
        async with started(config, Rank, replacements, Fault("learner", OFFER, "hangs")) as (group, world):
            group.offer(0, [4], 0, ["group"], ["embedding"])
            await asyncio.sleep(5.0)
            if moves:
                await group.leave(["node-1"])
            assert await group.update(0, ["group"], ["embedding"]) == "update 0"
            assert world.happened == ["learner-0.0 hangs at offer"]
            assert group.rebuilt == 1

    virtual_clock.run(test())
    assert replacements.left == 5 - spent


def test_ranks_that_lose_each_other_and_live_are_rebuilt_once(tmp_path: Path) -> None:
    config, replacements = small_config(tmp_path, "ranks", "learner.world_size=2"), Replacements(5)

    async def test() -> None:
        async with started(config, CutOff, replacements) as (group, _):
            assert await group.update(0, ["group"], ["embedding"]) == "update 0"
            assert group.rebuilt == 1

    virtual_clock.run(test())
    assert replacements.left == 4


class Missing(Rank):
    """Its first update loses the connection; then samples are lost, once."""

    calls = 0

    def update(self, iteration: int) -> str:
        if self._again():
            raise PeerGone("learning", "the connection to another rank of its group is closed")
        return super().update(iteration)

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        if Missing.calls and self._again():
            raise InputGone("fetching the samples", "an object it needs is lost")

    def _again(self) -> bool:
        Missing.calls += 1
        return Missing.calls <= 2


def test_other_roles_of_a_card_wait_for_a_rebuilt_group_but_not_if_it_waits_for_them(tmp_path: Path) -> None:
    config, waited = small_config(tmp_path, "ranks"), list[bool]()

    async def test() -> None:
        def others_may_start() -> bool:
            return all(world.process(actor).learner_is_idle.is_set() for actor in world.actors)

        async def beginning() -> None:
            waited.append(others_may_start())

        async def supply(iteration: int) -> list[Any]:
            waited.append(others_may_start())
            return ["group"]

        asked: dict[str, Callable[..., Any]] = {"last_state": beginning, "supply": supply}
        async with started(config, Missing, Replacements(5), cards=1, **asked) as (group, world):
            group.saved()
            assert await group.update(0, ["group"], ["embedding"]) == "update 0"
            waited.append(others_may_start())

    virtual_clock.run(test())
    assert waited == [False, True, True]


def test_a_revision_is_of_the_state_that_comes_with_it_though_a_repeated_update_has_other_bits(tmp_path: Path) -> None:
    config = small_config(tmp_path, "ranks")

    async def test() -> None:
        fault = Fault("learner", STATE, "dies before")
        async with started(config, lambda: OnGpu(config), Replacements(1), fault) as (group, world):
            await group.update(0, [], [])
            state, revision = await group.updated(lambda: None)
        assert world.happened == ["learner-0.0 dies before at state"]
        made = {name: each for name, each in revision.manifest.tensors.items() if name in state.old}
        assert made == stamps(state.old)

    virtual_clock.run(test())
