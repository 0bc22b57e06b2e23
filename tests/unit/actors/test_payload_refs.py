"""Payloads of a publication: each is made once, for all who are sent the same."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from actors.fleet.worker import PayloadRefs
from solrl_ray.errors import RunError
from solrl_ray.weight_sync.payload import Payload
from solrl_ray.weight_sync.publication import CARD, EXPLORER, REGENERATOR
from tests.support.weight_sync import factors, publication, publisher


class Store:
    """A world with an object store, whose references are places in a list."""

    def __init__(self) -> None:
        self.contents: list[Payload] = []

    async def blocking(self, work: Callable[[], Any], name: str, seconds: float) -> Any:
        await asyncio.sleep(0)
        return work()

    def put(self, content: Payload) -> int:
        self.contents.append(content)
        return len(self.contents) - 1


@pytest.mark.parametrize(("mode", "made"), [("packed", 3), ("lora", 2)])
def test_explorers_and_regenerators_that_get_the_factors_share_one_payload(mode: str, made: int) -> None:
    async def refs() -> tuple[list[int], int]:
        payloads = PayloadRefs(publication(publisher().build(1, factors()), mode), store, 1.0)  # type: ignore[arg-type]
        asked = [(EXPLORER, False), (REGENERATOR, False), (CARD, True), (CARD, False), (EXPLORER, True)]
        found = await asyncio.gather(*[payloads.ref(role, full=full) for role, full in asked])
        return found, await payloads.size(EXPLORER)

    store = Store()
    (explorer, regenerator, without_learner, card, again), size = asyncio.run(refs())
    assert len(store.contents) == made
    assert (explorer == regenerator) == (mode == "lora")
    assert explorer == again
    assert regenerator == without_learner
    assert store.contents[card].tensors == {}
    assert size == store.contents[explorer].nbytes > 0


class Hangs(Store):
    """Its first work never returns, and ends with an error after a while."""

    asked = 0

    async def blocking(self, work: Callable[[], Any], name: str, seconds: float) -> Any:
        self.asked += 1
        if self.asked == 1:
            await asyncio.sleep(seconds)
            raise RunError(f"{name} passed its deadline of {seconds:g} s")
        return work()


def test_a_payload_whose_asker_leaves_is_made_for_the_next_one_and_its_error_is_nobodys() -> None:
    """Also if nobody else asks for it: then a task would be left with an error that nobody sees."""
    unseen: list[Any] = []

    async def asked(others: int) -> list[int]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        store: Any = Hangs()
        payloads = PayloadRefs(publication(publisher().build(1, factors()), "lora"), store, 0.05)
        first, *rest = [asyncio.create_task(payloads.ref(EXPLORER)) for _ in range(1 + others)]
        await asyncio.sleep(0.01)
        first.cancel()
        found = await asyncio.gather(*rest)
        await asyncio.sleep(0.1)
        assert len(store.contents) == (others > 0)
        return found

    assert asyncio.run(asked(others=0)) == []
    assert asyncio.run(asked(others=2)) == [0, 0]
    gc.collect()
    assert not unseen
