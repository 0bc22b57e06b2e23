"""What rewards keep of prompts: once computed, and no more of them than a bounded number."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from solrl_ray.rewards.texts import KEPT, Texts


def test_no_more_prompts_are_kept_however_many_a_long_run_has() -> None:
    made = []

    def encode(prompt: str) -> Tensor:
        tensor = torch.full((4,), float(prompt))
        made.append(weakref.ref(tensor))
        return tensor

    texts = Texts("reward", encode, count=lambda _: 1, limit=1)
    for prompt in range(KEPT + 50):
        assert texts([str(prompt)] * 2).tolist() == [[float(prompt)] * 4] * 2
    assert len(made) == KEPT + 50
    assert sum(reference() is not None for reference in made) == KEPT
    assert texts(["7"]).tolist() == [[7.0] * 4]  # let go, and made again


def test_a_cut_prompt_is_counted_once_and_told_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    texts = Texts("reward", lambda prompt: torch.zeros(1), count=len, limit=4)
    texts(["long prompt", *map(str, range(KEPT)), "long prompt"])
    assert texts.truncated == 1
    assert [record.getMessage() for record in caplog.records] == [
        "reward: a prompt of 11 tokens is cut to 4 (1 prompt cut so far): long prompt"
    ]
    texts([f"another {number}" for number in range(9)])
    assert texts.truncated == 10
    assert [record.getMessage().split(" (")[1] for record in caplog.records] == [
        "1 prompt cut so far): long prompt",
        "2 prompts cut so far): another 0",
        "4 prompts cut so far): another 2",
        "8 prompts cut so far): another 6",
    ]
