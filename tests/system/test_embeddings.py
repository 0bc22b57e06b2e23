"""Encoders as actors of Ray: their answers reach the disk and come back by reference, and their loss is noticed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import ray
import torch

from actors.cluster.rpc import Callee
from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.fleet.actor_factory import Actor
from actors.ray_world import RayWorld
from actors.world import Tasks
from solrl_ray.config.loading import load
from solrl_ray.errors import RunError
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.records import Prompt, PromptEmbedding
from tests.support.documents import ROOT

pytestmark = pytest.mark.usefixtures("local_ray")


class Encoder(Callee):
    """Answers as an encoder does."""

    def start(self) -> dict[str, str]:
        return {}

    def embed(self, prompts: Sequence[Prompt]) -> list[PromptEmbedding]:
        if any(prompt.id == "!" for prompt in prompts):
            os._exit(1)
        tensors = {"prompt_embeds": torch.ones(4, 8, dtype=torch.bfloat16)}
        return [
            PromptEmbedding(prompt_id=each.id, tensors=tensors, digest=embedding_digest(tensors)) for each in prompts
        ]


class Encoders(RayWorld):
    """Ray's world, with encoders alone."""

    def __init__(self) -> None: ...

    def text_encoder(self, name: str) -> Actor:  # type: ignore[override]
        return Actor(ray.remote(Encoder).options(num_cpus=0).remote(), "text_encoder")


def prompts(ids: str) -> list[Prompt]:
    return [Prompt(id=key, text=key) for key in ids]


def test_embeddings_of_many_prompts_come_by_reference_until_the_last_encoder_is_lost(tmp_path: Path) -> None:
    many = prompts("".join(map(chr, range(1000, 1150))))

    async def asked() -> None:
        world = Encoders()
        async with Tasks() as tasks:
            config = load([ROOT / "configs" / "demo.yaml"], ["fleet.encoders.micro_batch=16"])
            embeddings = PromptEmbeddings(config, tmp_path, world, tasks)
            for name in ("encoder-0", "encoder-1"):
                embeddings.join(name, world.text_encoder(name))
            refs = await embeddings.of([*many, many[0]])
            assert [(await ref).prompt_id for ref in refs.values()] == list(refs) == [prompt.id for prompt in many]
            assert len(list(tmp_path.iterdir())) == 150
            await embeddings.of(prompts("ab!"))

    with pytest.raises(RunError, match=r"^encoding 3 prompts by encoder-[01] .* failed: its worker is gone: "):
        asyncio.run(asked())
