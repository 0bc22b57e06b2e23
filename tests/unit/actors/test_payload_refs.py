"""Payloads of a publication: each is made once, for all who are sent the same."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.fleet.worker import PayloadRefs
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.publication import CARD, EXPLORER, REGENERATOR
from tests.support.weight_sync import factors, publication, publisher


class Store:
    """A world with an object store, whose references are places in a list."""

    def __init__(self) -> None:
        self.contents: list[np.ndarray] = []

    async def blocking(self, work: Callable[[], Any], name: str, seconds: float) -> Any:
        await asyncio.sleep(0)
        return work()

    def put(self, content: np.ndarray) -> int:
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
    assert payload.read(store.contents[card]).tensors == {}
    assert size == len(store.contents[explorer])
