"""Time to a share of `direct`'s gain: which variant is the reference, the ratio, and its interval over seeds."""

from __future__ import annotations

from typing import Any

import pytest
from time_to_target import comparisons, mean_with_interval
from variants import DIRECTS, TABLES, VARIANTS

Curve = list[float]
GRID = [0, 4, 8, 12]


def runs(*curves: Curve) -> dict[str, Any]:
    return {str(42 + n): {"iterations": GRID[: len(curve)], "reward": curve} for n, curve in enumerate(curves)}


def compared(direct: dict[str, Any], mine: dict[str, Any], price: float = 1.0) -> dict[str, Any]:
    prices = {"direct": {"m": 1.0}, "scaled": {"m": price}}
    return comparisons({"direct": direct, "scaled": mine}, prices)["scaled"]


def test_every_variant_is_measured_by_the_direct_run_of_its_own_method() -> None:
    assert DIRECTS.keys() == {variant.method for variant in VARIANTS.values()}
    for method, name in DIRECTS.items():
        assert VARIANTS[name].method == method
    everybody = {name: runs([0.0, 1.0]) for name in VARIANTS}
    found = comparisons(everybody, {name: {"m": 1.0} for name in VARIANTS})
    assert {name: row["reference"] for name, row in found.items() if "grpo" in name or "awm" in name} == {
        "awm_direct": "awm_direct",
        "awm_two_stage": "awm_direct",
        "flow_grpo_direct": "flow_grpo_direct",
        "flow_grpo_two_stage": "flow_grpo_direct",
        "dance_grpo_direct": "dance_grpo_direct",
        "dance_grpo_two_stage": "dance_grpo_direct",
    }
    assert {row["reference"] for name, row in found.items() if "grpo" not in name and "awm" not in name} == {"direct"}


def test_without_the_run_of_its_reference_a_variant_is_not_compared() -> None:
    there = {"direct": runs([0.0, 1.0]), "awm_two_stage": runs([0.0, 1.0])}
    assert list(comparisons(there, {name: {"m": 1.0} for name in there})) == ["direct"]


def test_every_table_has_its_references_and_known_rows() -> None:
    for rows in TABLES.values():
        assert {DIRECTS[VARIANTS[name].method] for name in rows} <= set(rows)
    assert set().union(*TABLES.values()) == set(VARIANTS)  # no variant is in no table


def test_a_ratio_is_that_of_charged_times_on_straight_lines_between_evaluations() -> None:
    found = compared(runs([0.2, 0.4, 0.6, 0.8]), runs([0.2, 0.6, 0.7, 0.8]), price=1.5)["targets"]
    half = found["0.5"]  # 0.5 is reached after 6 iterations, and by the other after 3
    assert (half["direct"], half["iterations"]) == (pytest.approx(6), pytest.approx(3))
    assert half["times_sooner"]["m"] == [pytest.approx(6 / 3 / 1.5), None, None]
    assert found["1"]["iterations"] == found["1"]["direct"] == 12


def test_direct_comes_to_all_of_its_own_gain_though_some_of_its_seeds_end_below_the_mean() -> None:
    direct = runs([0.1, 0.3, 0.5, 0.7], [0.1, 0.4, 0.6, 0.9])
    for row in compared(direct, direct)["targets"].values():
        ratio, low, high = row["times_sooner"]["m"]
        assert ratio == 1
        assert low <= 1 <= high


def test_the_interval_is_as_wide_as_the_seeds_differ_and_0_where_some_never_arrive() -> None:
    direct, same = runs([0.0, 0.2, 0.4, 0.6], [0.0, 0.2, 0.4, 0.6]), [0.0, 0.6, 0.6, 0.6]
    sooner = compared(direct, runs(same, same))["targets"]["1"]["times_sooner"]["m"]
    assert sooner == [pytest.approx(3)] * 3
    never = [0.0, 0.1, 0.1, 0.1]
    half = compared(direct, runs(same, same, never))["targets"]["0.5"]["times_sooner"]["m"]
    assert half[1] == 0  # most draws of three seeds have two that arrive, some have none
    assert half[0] < half[2] == pytest.approx(3)


def test_what_is_not_reached_has_no_ratio_and_one_seed_has_no_interval() -> None:
    row = compared(runs([0.0, 0.5, 1.0]), runs([0.0, 0.5, 0.6]))["targets"]["0.9"]
    assert row == {"iterations": None, "direct": pytest.approx(7.2), "times_sooner": {"m": [None, None, None]}}
    assert mean_with_interval([0.5]) == (0.5, None)
    assert mean_with_interval([0.4, 0.6]) == (0.5, pytest.approx(12.706 * 0.1, rel=1e-4))


def test_seeds_of_other_evaluations_are_not_averaged() -> None:
    other = {"43": {"iterations": [0, 5, 10, 15], "reward": [0.0, 0.1, 0.2, 0.3]}}
    with pytest.raises(ValueError, match="evaluated after other iterations"):
        compared(runs([0.0, 0.1, 0.2, 0.3]), runs([0.0, 0.1, 0.2, 0.3]) | other)
