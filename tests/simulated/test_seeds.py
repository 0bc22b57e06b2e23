"""Thousands of runs of the real controller, each with other sizes and other faults, end with the same digests.

``make simulate SEEDS=a..b`` runs a range of seeds; a failing seed is run again with ``--trace``.
"""

from __future__ import annotations

import pytest

from solrl_ray.simulator.world import Fault
from tests.simulated.runs import KINDS, Plan, run, undisturbed, violation

SEEDS = 2000
AT_A_TIME = 25


@pytest.mark.parametrize("first", range(0, SEEDS, AT_A_TIME))
def test_whatever_goes_wrong_a_run_ends_with_the_digests_of_an_undisturbed_one(first: int) -> None:
    found = {seed: said for seed in range(first, first + AT_A_TIME) if (said := violation(Plan.of(seed)))}
    assert not found


def test_a_seed_replays_its_run_to_the_same_trace() -> None:
    disturbed = next(plan for plan in map(Plan.of, range(100)) if len(plan.faults) == 4 and plan.crashes)
    first, second = run(disturbed), run(disturbed)
    assert first.happened
    assert first.trace == second.trace


def test_every_kind_of_fault_hits_runs_of_these_seeds() -> None:
    """Else a test that nothing goes wrong in would be passed as well."""
    drawn = {(fault.role, fault.kind) for seed in range(SEEDS) for fault in Plan.of(seed).faults}
    assert drawn == {(role, kind) for role, kinds in KINDS.items() for kind in kinds}


def test_faults_happen_and_are_survived() -> None:
    calm = Plan.of(4).calm()
    faults = (Fault("explorer", 8, "dies before"), Fault("selector", 6, "dies after"), Fault("learner", 9, "hangs"))
    ended = run(Plan(1, calm.shape, 2, 1, 1, faults))
    assert [each.split()[0].partition("-")[0] for each in ended.happened] == ["explorer", "selector", "learner"]
    assert ended.digests == undisturbed(calm.shape)
    assert not ended.errors
