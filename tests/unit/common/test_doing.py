"""What a process says that it does, and how far the progress bars of its libraries are."""

from __future__ import annotations

import sys
import time
from types import ModuleType

import pytest
from diffusers.utils import logging as of_diffusers
from tqdm import tqdm
from transformers.utils import logging as of_transformers

from solrl_ray.common import doing

SHARD_SECONDS = 0.11
"""A bar that is iterated over counts what is done once a tenth of a second."""


def test_the_innermost_of_what_is_being_done_is_told_and_nothing_after_it() -> None:
    assert doing.now() == ""
    with doing.doing("loading the reward"):
        with doing.doing("loading CLIPModel"):
            assert doing.now() == "loading CLIPModel"
        assert doing.now() == "loading the reward"
    assert doing.now() == ""


@pytest.mark.parametrize("library", [of_diffusers, of_transformers])
def test_it_is_told_how_far_a_librarys_bar_is(library: object) -> None:
    said = []
    with doing.doing("loading transformer"):
        for _ in library.tqdm(range(3), desc="Loading checkpoint shards"):  # type: ignore[attr-defined]
            said.append(doing.now())
            time.sleep(SHARD_SECONDS)
        assert doing.now() == "loading transformer"
    assert said == [f"loading transformer, {done} of 3 shards" for done in range(3)]


def test_bytes_are_told_in_gigabytes_and_a_bar_of_unknown_length_not_at_all() -> None:
    with doing.doing("loading transformer"), tqdm(total=5_000_000_000, unit="B", desc="model.safetensors") as bar:
        bar.update(1_200_000_000)
        assert doing.now() == "loading transformer, 1.2 of 5.0 GB of model.safetensors"
    with doing.doing("loading transformer"), tqdm(desc="Loading"):
        assert doing.now() == "loading transformer"


def test_a_bar_of_what_nobody_named_is_not_told() -> None:
    with tqdm(total=3):
        assert doing.now() == ""


def test_what_is_done_is_told_while_the_library_of_bars_is_still_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))  # as import leaves it there until its end
    with doing.doing("loading transformer"):
        assert doing.now() == "loading transformer"


def test_a_bar_that_cannot_be_read_is_as_no_bar() -> None:
    with doing.doing("loading transformer"), tqdm(total=3, desc="shards") as bar:
        assert doing.now() == "loading transformer, 0 of 3 shards"
        bar.start_t = None
        assert doing.now() == "loading transformer"
        bar.start_t = time.time()
