"""When a run is said to run away, on records whose numbers are worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from solrl_ray.evaluation.stability import alarm, alarms, allowed_stderrs, best, fall, news, warnings
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from tests.support.made_runs import evaluation, iteration


def held_out(updates: int, *means: float, policy: str = "ema") -> EvaluationMetrics:
    """Of one prompt for each mean."""
    return evaluation(updates, policy, {f"p{i}": (mean,) for i, mean in enumerate(means)})


BASE = held_out(0, 0.4, 0.5, 0.6, policy="base")
TOP = held_out(2, 0.6, 0.8, 1.0)


@pytest.mark.parametrize(
    ("means", "found"),
    [
        # Differences .199, .2, .201: deviation .001, over the root of 3, times t(2) at 1e-4, which is 70.7.
        ((0.401, 0.6, 0.799), {"by": 0.2, "allowed": 70.7 * 0.001 / 3**0.5, "best": 2.0}),
        # Differences .1, .2, .3: a hundred times the deviation.
        ((0.5, 0.6, 0.7), {}),
        ((0.7, 0.9, 1.1), {}),
        ((0.5, 0.7, 0.9), {"by": 0.1, "allowed": 0.0, "best": 2.0}),  # the same for all prompts: no error
    ],
)
def test_a_fall_is_further_than_chance_takes_the_paired_difference(
    means: tuple[float, ...], found: dict[str, float]
) -> None:
    made = fall([BASE, TOP, held_out(4, 0.7, 0.7, 0.7)], held_out(6, *means))
    assert made == pytest.approx(found, rel=1e-5, abs=1e-12)


# Student's t that one in 10,000 exceeds, of a table.
@pytest.mark.parametrize(("prompts", "t"), [(2, 3183.1), (8, 7.063), (9, 6.442), (24, 4.4152), (64, 3.9499)])
def test_few_prompts_allow_more(prompts: int, t: float) -> None:
    assert allowed_stderrs(prompts) == pytest.approx(t, rel=1e-4)


def test_the_base_counts_unless_the_run_began_with_other_weights() -> None:
    low = held_out(1, 0.1, 0.2, 0.3)
    assert fall([BASE], low)["best"] == 0
    assert best([BASE, low]) is BASE
    assert best([BASE, low], trained=True) is low
    first = held_out(0, 0.2, 0.2, 0.2)
    assert fall([BASE], first) == {}  # a warm start may be worse than the base
    assert best([BASE, first, low]) is first  # of equal means the earliest
    assert fall([TOP], held_out(4, 0.1)) == {}  # other prompts cannot be compared


def run(*norms: float) -> list[IterationMetrics]:
    records: list[IterationMetrics] = []
    for number, norm in enumerate(norms):
        record = replace(iteration(number), gradient_norm=norm)
        records.append(replace(record, alarms=alarms(records, record)))
    return records


# Median 1, median absolute deviation .1: the usual range ends at 1 + 6 × .14826.
CALM = (0.9, 1.1, 1.0, 0.8, 1.2, 1.0, 1.1, 0.9, 0.7, 1.3)


def test_an_alarm_is_that_the_median_of_three_leaves_the_range_of_the_run_before() -> None:
    records = run(*CALM, 9.0, 1.0, 2.0, 3.0)
    assert [bool(record.alarms) for record in records] == [False] * 12 + [True, True]
    assert records[12].alarms == {"gradient_norm": pytest.approx(1 + 6 * 0.14826)}
    assert news(records[:12], records[12]) != ""
    assert news(records[:13], records[13]) == ""  # told once
    assert "gradient norm (3, usually up to" in alarm(records, [])
    assert alarm(run(*CALM, 9.0, 1.0, 1.0), []) == ""  # a spike
    assert run(*CALM[:9], 9.0, 9.0, 9.0)[-1].alarms == {}  # of nine values nothing is usual


def test_values_that_hardly_vary_have_a_range_of_some_width() -> None:
    assert run(*[1.0] * 10, *[1.29] * 3)[-1].alarms == {}
    assert run(*[1.0] * 10, *[1.31] * 3)[-1].alarms != {}


def test_readers_of_the_results_are_told_what_happened() -> None:
    fallen = held_out(6, 0.401, 0.6, 0.799)
    fallen = replace(fallen, fall=fall([BASE, TOP], fallen))
    said = warnings([iteration(0), replace(iteration(6), rollback=2)], [BASE, TOP, fallen])
    assert len(said) == 2
    assert all(part in said[0] for part in ("after 6 updates is 0.2000 lower than after 2", "0.0408"))
    assert "after iteration 7 to the state after 2 updates" in said[1]
