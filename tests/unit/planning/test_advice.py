"""A plan says when explorers have nothing to do or many regenerated images are padding, and which setting is better."""

from __future__ import annotations

import pytest

from solrl_ray.config.checks import check
from solrl_ray.config.loading import load_with_sources
from solrl_ray.planning.advice import advice
from tests.support.command_line import printed
from tests.support.small import CONFIGS

POOL = ("rollout.pool=96", "rollout.prompts=4", "learner.micro_batch=8")
PRUNED = (*POOL, "rollout.keep=24", "rollout.explore.micro_batch=12", "rollout.preview.prune={after: 2, keep: 36}")
CUT = "rollout.preview.unit is 96"
HALVES_KEPT = (*PRUNED[:-1], "rollout.preview.prune={after: 2, keep: 48}")


def advised(*overrides: str) -> tuple[str, ...]:
    loaded = load_with_sources([CONFIGS / "demo.yaml"], overrides)
    check(loaded.config, loaded.sources)
    return advice(loaded.config)


def explorers(count: int) -> str:
    return f"fleet.explorers.count={count}"


@pytest.mark.parametrize(
    ("overrides", "idle", "units", "key"),
    [
        ((*PRUNED, explorers(6)), "2 of 6", 4, CUT),
        ((*HALVES_KEPT, explorers(16)), "12 of 16", 4, CUT),
        ((*PRUNED, "rollout.preview.unit=48", explorers(10)), "2 of 10", 8, "rollout.preview.unit is 48"),
        ((*PRUNED[:-1], explorers(33)), "1 of 33", 32, "rollout.explore.micro_batch is 12"),
        (
            (*POOL, "rollout.strategy=scaled", "rollout.regenerate.micro_batch=96", explorers(5)),
            "1 of 5",
            4,
            "rollout.regenerate.micro_batch is 96",
        ),
    ],
)
def test_explorers_without_a_unit_are_counted(overrides: tuple[str, ...], idle: str, units: int, key: str) -> None:
    (said,) = advised("rollout.keep=24", "rollout.regenerate.micro_batch=24", *overrides)
    assert said.startswith(idle)
    assert all(words in said for words in (f"{units} units", key))
    assert said.endswith(f"; {units} explorers are equally fast")


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
    (said,) = advised(*POOL, f"rollout.keep={keep}", f"rollout.regenerate.micro_batch={micro_batch}")
    assert f"{images} images" in said
    assert f"of which {padding} are padding" in said
    assert f"rollout.regenerate.micro_batch={better} " in said


@pytest.mark.parametrize(
    "overrides",
    [
        (*PRUNED, "rollout.regenerate.micro_batch=24", explorers(4)),
        ("rollout.keep=24", "rollout.regenerate.micro_batch=6"),
        ("rollout.keep=20", "rollout.regenerate.micro_batch=24"),
        ("rollout.keep=22", "rollout.regenerate.micro_batch=12"),
        ("rollout.keep=8", "rollout.regenerate.micro_batch=24", "rollout.strategy=scaled"),  # regenerates nothing
    ],
)
def test_where_all_have_work_and_little_is_padded_nothing_is_said(overrides: tuple[str, ...]) -> None:
    assert advised(*POOL, *overrides) == ()


def test_with_several_shapes_padding_of_the_learner_is_counted_as_well() -> None:
    padded = ("rollout.keep=8", "learner.micro_batch=12")
    assert advised(*padded) == ()
    (said,) = advised(*padded, "model.resolution=[[32, 32], [24, 40]]")
    assert "12 samples are trained on, of which 4 are padding" in said
    assert said.endswith("learner.micro_batch=8 saves that time")


def test_padding_of_an_optimiser_step_is_counted_over_its_ranks() -> None:
    small = (
        "rollout={prompts: 6, keep: 4, regenerate: {micro_batch: 4}}",
        "learner={updates: 3, micro_batch: 4}",
    )  # 8 samples a step
    assert advised(*small) == advised(*small, "learner={world_size: 8, micro_batch: 1}") == ()
    (said,) = advised(*small, "learner.world_size=8")
    assert "computes 32 samples, of which 24 are padding" in said
    assert said.endswith("learner.micro_batch=1 saves that time")
    assert advised(*small, "learner={world_size: 16, micro_batch: 1}") == ()  # no smaller one is there


def test_the_plan_has_the_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "plan", "demo", "--set", explorers(13), "--set", "rollout.keep=4")
    assert "note: 1 of 13 explorers" in said
    assert "note: for each prompt 8 images" in said
