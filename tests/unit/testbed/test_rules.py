"""The words of a caption that hold in a picture, of pictures whose scene is known."""

from __future__ import annotations

import pytest
import torch

from solrl_ray.testbed.rules import words_that_hold
from solrl_ray.testbed.world import parse, render

CAPTIONS = (
    "a large red circle on black",
    "a small blue ring left of a large green cross on white",
    "a large pink triangle below a small cyan square on grey",
)


def drawn(*captions: str) -> torch.Tensor:
    """Pictures float32 [B, 3, 32, 32]; the objects stand anywhere that a caption allows."""
    jitter = torch.rand(len(captions), 8, generator=torch.Generator().manual_seed(len(captions)))
    return render(torch.tensor([parse(caption).fields for caption in captions]), jitter)


def test_in_its_own_picture_every_word_holds() -> None:
    assert words_that_hold(drawn(*CAPTIONS), CAPTIONS).tolist() == [1.0, 1.0, 1.0]
    noisy = drawn(*CAPTIONS) + 0.1 * torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert words_that_hold(noisy.clamp(0, 1), CAPTIONS).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("shown", "held"),
    [
        ("a small blue ring left of a large green circle on white", 7 / 8),
        ("a small blue ring above a large green cross on white", 7 / 8),
        ("a large blue ring left of a large green cross on grey", 6 / 8),
    ],
)
def test_a_word_that_the_picture_does_not_show_is_counted(shown: str, held: float) -> None:
    assert words_that_hold(drawn(shown), CAPTIONS[1:2]).item() == pytest.approx(held)


def test_in_a_picture_of_anything_else_few_words_hold() -> None:
    other = words_that_hold(drawn(*CAPTIONS[1:]), (CAPTIONS[2], CAPTIONS[1]))
    assert (other < 0.5).all()


def test_a_prompt_of_another_world_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a caption of the testbed's world"):
        words_that_hold(drawn(CAPTIONS[0]), ["a cat"])
