"""What a process says that it does, and how far the progress bars of its libraries are."""

from __future__ import annotations

import sys
import time
from types import ModuleType

import pytest
from diffusers.utils import logging as of_diffusers
from tqdm import tqdm
from transformers.utils import logging as of_transformers

from solrl_ray.common.progress_note import now, progress_note

SHARD_SECONDS = 0.11
"""A bar that is iterated over counts what is done once a tenth of a second."""


def test_the_innermost_of_what_is_being_done_is_told_and_nothing_after_it() -> None:
    assert now() == ""
    with progress_note("loading the reward"):
        with progress_note("loading CLIPModel"):
            assert now() == "loading CLIPModel"
        assert now() == "loading the reward"
    assert now() == ""


@pytest.mark.parametrize("library", [of_diffusers, of_transformers])
def test_it_is_told_how_far_a_librarys_bar_is(library: object) -> None:
    library.enable_progress_bar()  # type: ignore[attr-defined] # `solrl validate` switches them off for its process
    said = []
    with progress_note("loading transformer"):
        for _ in library.tqdm(range(3), desc="Loading checkpoint shards"):  # type: ignore[attr-defined]
            said.append(now())
            time.sleep(SHARD_SECONDS)
        assert now() == "loading transformer"
    assert said == [f"loading transformer, {done} of 3 shards" for done in range(3)]


def test_bytes_are_told_in_gigabytes_and_a_bar_of_unknown_length_not_at_all() -> None:
    with progress_note("loading transformer"), tqdm(total=5_000_000_000, unit="B", desc="model.safetensors") as bar:
        bar.update(1_200_000_000)
        assert now() == "loading transformer, 1.2 of 5.0 GB of model.safetensors"
    with progress_note("loading transformer"), tqdm(desc="Loading"):
        assert now() == "loading transformer"


def test_a_bar_of_what_nobody_named_is_not_told() -> None:
    with tqdm(total=3):
        assert now() == ""


def test_what_is_done_is_told_while_the_library_of_bars_is_still_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))  # as import leaves it there until its end
    with progress_note("loading transformer"):
        assert now() == "loading transformer"


def test_a_bar_that_cannot_be_read_is_as_no_bar() -> None:
    with progress_note("loading transformer"), tqdm(total=3, desc="shards") as bar:
        assert now() == "loading transformer, 0 of 3 shards"
        bar.start_t = None
        assert now() == "loading transformer"
        bar.start_t = time.time()
