"""Which prompts the encoder is asked for, and how often."""

from __future__ import annotations

import os
import time

import pytest
import ray

from actors.dispatch.prompt_embeddings import PromptEmbeddings
from solrl_ray.config.schema import Deadlines
from solrl_ray.errors import RunError
from solrl_ray.records import Prompt, PromptEmbedding

pytestmark = pytest.mark.usefixtures("local_ray")


class Asked:
    """Answers as an encoder does, and notes what it was asked for."""

    def __init__(self) -> None:
        self._asked: list[str] = []

    def start(self) -> None:
        pass

    def embed(self, prompt: Prompt) -> PromptEmbedding:
        self._asked.append(prompt.id)
        return PromptEmbedding(prompt_id=prompt.id, tensors={}, digest="")

    def taken(self) -> str:
        """What it was asked for since the last time."""
        asked, self._asked = self._asked, []
        return "".join(asked)


def prompts(ids: str) -> list[Prompt]:
    return [Prompt(id=key, text=key) for key in ids]


def test_what_was_asked_for_ahead_outlasts_an_evaluation_and_nothing_else_does() -> None:
    encoder = ray.remote(Asked).options(num_cpus=0).remote()
    embeddings = PromptEmbeddings(encoder, Deadlines())

    def of(ids: str) -> str:
        """Which of them the encoder was asked for, now or ahead."""
        refs = embeddings.of(prompts(ids))
        assert [ray.get(ref, timeout=60).prompt_id for ref in refs.values()] == list(refs) == list(ids)
        taken: str = ray.get(encoder.taken.remote(), timeout=60)
        return taken

    assert of("abc") == "abc"
    assert of("cbd") == "d"
    embeddings.ask_ahead(prompts("cef"))
    assert of("xy") == "efxy"  # held-out prompts
    assert of("fce") == ""
    assert of("xf") == "x"
    assert of("cd") == "cd"


class Hangs(Asked):
    def start(self) -> None:
        time.sleep(3600.0)


def test_an_encoder_that_hangs_is_named_with_the_deadline_that_it_missed() -> None:
    encoder = ray.remote(Hangs).options(num_cpus=0).remote()
    embeddings = PromptEmbeddings(encoder, Deadlines(start=1.0, encode=0.5))
    with pytest.raises(RunError, match=r"^the start of the encoder failed: no answer within its deadline of 1 s$"):
        embeddings.await_encoder()
    with pytest.raises(RunError, match=r"^encoding 3 prompts failed: no answer within its deadline of 1\.5 s$"):
        embeddings.of(prompts("abc"))


def test_an_encoder_that_is_gone_is_named_with_what_it_was_asked_for() -> None:
    encoder = ray.remote(Asked).options(num_cpus=0).remote()
    embeddings = PromptEmbeddings(encoder, Deadlines())
    embeddings.await_encoder()
    known = embeddings.of(prompts("a"))
    encoder.__ray_call__.remote(lambda _: os._exit(1))
    with pytest.raises(RunError, match=r"^encoding 3 prompts failed: its worker is gone: "):
        embeddings.of(prompts("bcd"))
    assert ray.get(known["a"], timeout=60).prompt_id == "a"  # the open iteration has what it needs
