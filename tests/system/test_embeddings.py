"""Which prompts the text encoder is asked for, and how often."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest
import ray

from actors.cluster.rpc import Callee
from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.fleet.actor_factory import Actor
from actors.ray_world import RayWorld
from solrl_ray.config.deadlines import Deadlines
from solrl_ray.errors import RunError
from solrl_ray.records import Prompt, PromptEmbedding

pytestmark = pytest.mark.usefixtures("local_ray")


class Asked(Callee):
    """Answers as an encoder does, and notes what it was asked for."""

    def __init__(self) -> None:
        self._asked: list[str] = []
        self._messages: list[int] = []

    def do_each(self, method: str, arguments: list[Any]) -> tuple[Any, ...]:
        self._messages.append(len(arguments))
        return super().do_each(method, arguments)

    def messages(self) -> list[int]:
        """Of how many prompts each of them was."""
        return self._messages

    def start(self) -> None:
        pass

    def embed(self, prompt: Prompt) -> PromptEmbedding:
        self._asked.append(prompt.id)
        return PromptEmbedding(prompt_id=prompt.id, tensors={}, digest="")

    def taken(self) -> str:
        """What it was asked for since the last time."""
        asked, self._asked = self._asked, []
        return "".join(asked)


class Hangs(Asked):
    def start(self) -> None:
        time.sleep(3600.0)


class WorldOf(RayWorld):
    """Ray's, with one text encoder."""

    def __init__(self, encoder: type) -> None:
        self.handle = ray.remote(encoder).options(num_cpus=0).remote()
        self.text_encoder = lambda: Actor(self.handle, "text_encoder")


def prompts(ids: str) -> list[Prompt]:
    return [Prompt(id=key, text=key) for key in ids]


def test_what_was_asked_for_ahead_outlasts_an_evaluation_and_nothing_else_does() -> None:
    async def asked() -> None:
        world = WorldOf(Asked)
        embeddings = PromptEmbeddings(world, Deadlines())

        async def of(ids: str) -> str:
            """Which of them the encoder was asked for, now or ahead."""
            refs = await embeddings.of(prompts(ids))
            assert [(await ref).prompt_id for ref in refs.values()] == list(refs) == list(ids)
            taken: str = await world.handle.taken.remote()
            return taken

        assert await of("abc") == "abc"
        assert await of("cbd") == "d"
        embeddings.ask_ahead(prompts("cef"))
        assert await of("xy") == "efxy"  # held-out prompts
        assert await of("fce") == ""
        assert await of("xf") == "x"
        assert await of("cd") == "cd"

    asyncio.run(asked())


def test_many_prompts_go_in_few_messages_and_each_has_a_reference_of_its_own() -> None:
    async def asked() -> None:
        world = WorldOf(Asked)
        many = prompts("".join(map(chr, range(1000, 1130))))
        refs = await PromptEmbeddings(world, Deadlines()).of([*many, many[0]])
        assert [(await ref).prompt_id for ref in refs.values()] == list(refs) == [prompt.id for prompt in many]
        assert await world.handle.messages.remote() == [64, 64, 2]

    asyncio.run(asked())


def test_an_encoder_that_hangs_is_named_with_the_deadline_that_it_missed() -> None:
    async def hangs() -> None:
        embeddings = PromptEmbeddings(WorldOf(Hangs), Deadlines(start=1.0, encode=0.5))
        key = r"\(fleet\.deadlines\.start; raise it if the machine is slow or busy\)"
        said = rf"^the start of the text encoder {key} failed: no answer within its deadline of 1 s$"
        with pytest.raises(RunError, match=said):
            await embeddings.await_encoder()
        with pytest.raises(RunError, match=r"^encoding 3 prompts failed: no answer within its deadline of 1\.5 s$"):
            await embeddings.of(prompts("abc"))

    asyncio.run(hangs())


def test_an_encoder_that_is_gone_is_named_with_what_it_was_asked_for() -> None:
    async def gone() -> None:
        world = WorldOf(Asked)
        embeddings = PromptEmbeddings(world, Deadlines())
        await embeddings.await_encoder()
        known = await embeddings.of(prompts("a"))
        world.handle.__ray_call__.remote(lambda _: os._exit(1))
        with pytest.raises(RunError, match=r"^encoding 3 prompts failed: its worker is gone: "):
            await embeddings.of(prompts("bcd"))
        assert (await known["a"]).prompt_id == "a"  # the open iteration has what it needs

    asyncio.run(gone())
