from dataclasses import replace

from solrl_ray.records import Pruning, WorkUnit
from solrl_ray.scheduling.hedging import ENOUGH, FLOOR, Hedging, Out


def unit(number: int, stage: str = "explore") -> WorkUnit:
    return WorkUnit(stage=stage, iteration=1, revision=1, prompt_id=f"p{number}", indices=(0, 1))


def measured(factor: float = 3.0, seconds: float = 10.0) -> Hedging:
    hedging = Hedging(factor)
    for number in range(ENOUGH):
        hedging.answered(unit(100 + number), seconds)
    return hedging


def out(seconds: float, *units: WorkUnit) -> Out:
    return Out(units, seconds)


def test_a_unit_is_late_after_so_many_medians_of_its_stage() -> None:
    hedging = measured()
    assert hedging.pairs(["e-2"], [out(29.0, unit(0)), out(30.0, unit(1))]) == []
    assert hedging.pairs(["e-2"], [out(29.0, unit(0)), out(31.0, unit(1))]) == [("e-2", unit(1))]
    assert hedging.pairs(["r-1"], [out(999.0, unit(0, stage="regenerate"))]) == []  # nothing known of that stage


def test_what_waits_behind_a_late_unit_is_late_and_who_is_out_longest_goes_first() -> None:
    held = [out(40.0, unit(0), unit(1)), out(50.0, unit(2))]
    assert measured().pairs(["e-2", "e-3", "e-4", "e-5"], held) == [
        ("e-2", unit(2)),
        ("e-3", unit(0)),
        ("e-4", unit(1)),
    ]
    assert measured().pairs(["e-2"], held) == [("e-2", unit(2))]
    assert measured().pairs([], held) == []


def test_a_unit_is_hedged_once_and_not_after_somebody_has_answered_it() -> None:
    hedging = measured()
    assert hedging.pairs(["e-2"], [out(40.0, unit(0)), out(1.0, unit(0))]) == []
    hedging.answered(unit(0), 10.0)
    assert hedging.pairs(["e-2"], [out(50.0, unit(0))]) == []


def test_short_units_are_not_worth_a_second_worker_and_0_switches_it_off() -> None:
    assert measured(seconds=0.1).pairs(["e-1"], [out(FLOOR, unit(0))]) == []
    assert measured(seconds=0.1).pairs(["e-1"], [out(FLOOR + 0.1, unit(0))]) == [("e-1", unit(0))]
    assert measured(factor=0.0).pairs(["e-1"], [out(1e6, unit(0))]) == []


def test_units_of_whole_pools_are_late_by_the_times_of_such_units() -> None:
    """The median is of the units that a run has, so patience grows with their size."""
    whole = [replace(unit(number), indices=tuple(range(96)), prune=Pruning(after=2, keep=36)) for number in range(5)]
    hedging = Hedging(3.0)
    for each in whole[:ENOUGH]:
        hedging.answered(each, 80.0)
    assert hedging.pairs(["e-2"], [out(239.0, whole[3])]) == []
    assert hedging.pairs(["e-2"], [out(241.0, whole[4])]) == [("e-2", whole[4])]
