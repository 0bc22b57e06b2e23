"""A plan says when many of the regenerated images are padding, and which micro-batch computes fewer."""

from __future__ import annotations

import pytest

from solrl_ray.config.checks import check
from solrl_ray.config.loading import load_with_sources
from solrl_ray.config.padded_samples import advice
from tests.support.command_line import solrl
from tests.support.small import CONFIGS


def advised(keep: int, micro_batch: int, *overrides: str) -> str:
    given = ("rollout.pool=96", f"rollout.keep={keep}", f"rollout.regenerate.micro_batch={micro_batch}", *overrides)
    loaded = load_with_sources([CONFIGS / "demo.yaml"], [*given])
    check(loaded.config, loaded.sources)
    return advice(loaded.config)


@pytest.mark.parametrize(
    ("keep", "micro_batch", "images", "padding", "better"),
    [
        (8, 24, 24, 16, 8),
        (18, 24, 24, 6, 18),  # a quarter
        (16, 12, 24, 8, 8),
        (26, 12, 36, 10, 9),  # three forwards, with one image of padding
    ],
)
def test_padding_of_a_quarter_or_more_is_counted_and_a_smaller_micro_batch_is_named(
    keep: int, micro_batch: int, images: int, padding: int, better: int
) -> None:
    assert advised(keep, micro_batch) == (
        f"for each prompt {images} images are regenerated, and {padding} of them are padding, because rollout.keep is "
        f"{keep} and rollout.regenerate.micro_batch {micro_batch}; rollout.regenerate.micro_batch={better} saves that "
        "time"
    )


@pytest.mark.parametrize(("keep", "micro_batch"), [(24, 24), (24, 6), (20, 24), (22, 12)])
def test_little_padding_is_not_mentioned(keep: int, micro_batch: int) -> None:
    assert advised(keep, micro_batch) == ""


def test_one_stage_regenerates_nothing() -> None:
    assert advised(8, 24, "rollout.strategy=scaled") == ""


def test_the_plan_has_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert solrl("plan", "demo", "--set", "rollout.keep=4") == 0
    assert "note: for each prompt 8 images are regenerated, and 4 of them are padding" in capsys.readouterr().out
