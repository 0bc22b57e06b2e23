"""Rewards that compute on the CPU take pictures that are on a GPU."""

from __future__ import annotations

import pytest
import torch

from solrl_ray.testbed.rules import words_that_hold

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_words_that_hold_in_a_picture_on_a_gpu() -> None:
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    caption = ["a small green triangle on grey"]
    assert torch.equal(words_that_hold(image.cuda(), caption).cpu(), words_that_hold(image, caption))
