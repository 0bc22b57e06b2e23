"""Writing in pictures, read by the models that come with RapidOCR; skipped where the extra ``ocr`` is not installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

pytest.importorskip("rapidocr", reason="the extra `ocr` is not installed")

from solrl_ray import rewards
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import RewardError
from solrl_ray.rewards.ocr import quoted, rendered


def written(text: str) -> torch.Tensor:
    picture = Image.new("RGB", (320, 128), "white")
    ImageDraw.Draw(picture).text((20, 40), text, fill="black", font=ImageFont.load_default(40))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


def test_a_picture_with_the_writing_that_was_asked_for_scores_highest() -> None:
    reward = rewards.load([RewardConfig(kind="ocr")], "cpu")
    pictures = torch.stack([written("OPEN 24"), written("OPEN 27"), written("")])
    scores = reward.score(pictures, ['A neon sign that says "Open 24"'] * 3)
    assert scores.tolist() == pytest.approx([1.0, 1 - 1 / 6, 0.0])


def test_a_prompt_that_asks_for_no_writing_is_refused() -> None:
    with pytest.raises(RewardError, match=r"^Reward .*ocr.* 'a sign'"):
        rewards.load([RewardConfig(kind="ocr")], "cpu").score(torch.zeros(1, 3, 32, 32), ["a sign"])


def test_what_is_in_quotation_marks_is_asked_for() -> None:
    assert quoted("\"Tea\" and “Coffee”, 「茶」, not 'milk'") == "Tea Coffee 茶"


@pytest.mark.parametrize(
    ("read", "wanted", "expected"),
    [
        ("hello world", "Hello World", 1.0),
        ("ABC hello DEF", "hello", 1.0),
        ("helo", "hello", 0.8),
        ("", "hello", 0.0),
        ("something else altogether", "xyz", 0.0),
    ],
)
def test_the_share_of_right_letters_counts(read: str, wanted: str, expected: float) -> None:
    assert rendered(read, wanted) == pytest.approx(expected)
