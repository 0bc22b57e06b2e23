"""What the configuration of a resumed run may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config.loading import Sources, load, load_with_sources
from solrl_ray.errors import UserError
from solrl_ray.storage import continuation
from tests.support.sentences import names


@pytest.mark.parametrize(
    "override",
    [
        "fleet.explorers.count=7",
        "run.iterations=99",
        "fleet.deadlines.update=1",
        "learner.world_size=3",
        "checkpoints.keep=9",
        "checkpoints.min_free_gb=0",
        "evaluation.every=5",
    ],
)
def test_a_resumed_run_may_change_who_works_how_long_and_what_is_kept(parts: list[Path], override: str) -> None:
    continuation.check(load(parts, [override]), load(parts), Path("runs/run"), Sources())


@pytest.mark.parametrize(
    ("override", "key", "values"),
    [
        ("rollout.pool=48", "rollout.pool", "48 96"),
        ("rewards.1.weight=2", "rewards.1.weight", "2.0 0.5"),
        ("rewards=[{kind: x}]", "rewards.0.kind", '"x" "clipscore"'),
        ("run.seed=1", "run.seed", "1 42 learner.world_size, compile.cache"),
        ("evaluation.samples=5", "evaluation.samples", "5 4"),
        (
            "evaluation.micro_batch=8",
            "evaluation.micro_batch",
            "8 0 `solrl eval runs/run --set evaluation.micro_batch=8`",
        ),
    ],
)
def test_a_resumed_run_may_change_nothing_else(parts: list[Path], override: str, key: str, values: str) -> None:
    given = load_with_sources(parts, [override])
    with pytest.raises(UserError) as caught:
        continuation.check(given.config, load(parts), Path("runs/run"), given.sources)
    assert names(str(caught.value), key, f"{values} runs/run")


@pytest.mark.parametrize(
    ("was", "now", "advice"),
    [
        ("evaluation.guidance=3.0", "evaluation.guidance=null", "`solrl eval runs/run --set evaluation.guidance=null`"),
        ("evaluation.pictures=4", "evaluation.pictures=2", ""),
        ("rollout.pool=96", "rollout.pool=48", ""),
    ],
)
def test_only_what_an_evaluation_measures_can_be_had_beside_the_run(
    parts: list[Path], was: str, now: str, advice: str
) -> None:
    given = load_with_sources(parts, [now])
    with pytest.raises(UserError) as caught:
        continuation.check(given.config, load(parts, [was]), Path("runs/run"), given.sources)
    assert ("solrl eval" in str(caught.value)) == bool(advice)
    assert advice in str(caught.value)


def test_a_reward_that_was_dropped_is_a_difference(parts: list[Path]) -> None:
    fewer = load(parts, ["rewards=[{kind: clipscore, path: some/clip}]"])
    assert continuation.first_difference(fewer, load(parts), free=continuation.FREE) == "rewards.1.kind"


@pytest.mark.parametrize(
    ("override", "key", "values"),
    [
        ("fleet.learners.threads=4", "fleet.learners.threads", "4 2"),
        ("learner.world_size=3", "learner.world_size", "3 1"),
    ],
)
def test_a_change_that_splits_sums_differently_is_noted(
    parts: list[Path], override: str, key: str, values: str
) -> None:
    (found,) = continuation.notes(load(parts, [override]), load(parts))
    assert names(found, key, values)
    assert found.endswith("the bytes may differ from an undisturbed run.")
    assert continuation.notes(load(parts, ["fleet.explorers.count=7", "checkpoints.keep=3"]), load(parts)) == []
