"""A plan says when explorers would have nothing to do, and which unit of previews gives them work."""

from __future__ import annotations

import pytest

from solrl_ray.config.checks import check
from solrl_ray.config.idle_explorers import advice
from solrl_ray.config.loading import load_with_sources
from tests.support.command_line import solrl
from tests.support.small import CONFIGS

PRUNED = ("rollout.pool=96", "rollout.keep=24", "rollout.explore.micro_batch=12", "rollout.prompts=4")
HALVED = ("rollout.preview.prune={after: 2, keep: 36}", "rollout.preview.unit=48")


def advised(*overrides: str) -> str:
    loaded = load_with_sources([CONFIGS / "demo.yaml"], [*PRUNED, *overrides])
    check(loaded.config, loaded.sources)
    return advice(loaded.config)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("rollout.preview.prune={after: 2, keep: 36}", "fleet.explorers.count=4"), ""),
        # Halves keep 18 of their 48 each. Thirds would keep 12 of 32, but 32 is no multiple of 12; quarters an odd 9.
        (
            ("rollout.preview.prune={after: 2, keep: 36}", "fleet.explorers.count=6"),
            "2 of 6 explorers have no work, because an iteration has 4 units (rollout.preview.unit is 96); "
            "rollout.preview.unit=48 makes 8",
        ),
        # 24 does for 16 explorers, 12 for 17.
        (
            ("rollout.preview.prune={after: 2, keep: 48}", "fleet.explorers.count=16"),
            "12 of 16 explorers have no work, because an iteration has 4 units (rollout.preview.unit is 96); "
            "rollout.preview.unit=24 makes 16",
        ),
        (
            ("rollout.preview.prune={after: 2, keep: 48}", "fleet.explorers.count=17"),
            "13 of 17 explorers have no work, because an iteration has 4 units (rollout.preview.unit is 96); "
            "rollout.preview.unit=12 makes 32",
        ),
        (
            (*HALVED, "fleet.explorers.count=10"),
            "2 of 10 explorers have no work, because an iteration has 8 units (rollout.preview.unit is 48); "
            "8 explorers are as fast",
        ),
        (
            ("fleet.explorers.count=33",),
            "1 of 33 explorers have no work, because an iteration has 32 units (rollout.explore.micro_batch is 12); "
            "32 explorers are as fast",
        ),
        # Of three prompts, other explorers have one, which is one unit.
        (
            (*HALVED[:1], "fleet.explorers.count=3", "fleet.other_explorers=[{name: a, prompts: 1, count: 2}]"),
            "1 of 5 explorers have no work, because an iteration has 4 units (rollout.preview.unit is 96); "
            "rollout.preview.unit=48 makes 8",
        ),
        (
            ("rollout.strategy=scaled", "rollout.regenerate.micro_batch=96", "fleet.explorers.count=5"),
            "1 of 5 explorers have no work, because an iteration has 4 units (rollout.regenerate.micro_batch is 96); "
            "4 explorers are as fast",
        ),
    ],
)
def test_explorers_without_a_unit_are_counted_and_a_smaller_unit_is_named(
    overrides: tuple[str, ...], sentence: str
) -> None:
    assert advised(*overrides) == sentence


def test_the_plan_has_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert solrl("plan", "demo", "--set", "fleet.explorers.count=13") == 0
    assert "note: 1 of 13 explorers have no work, because an iteration has 12 units" in capsys.readouterr().out
