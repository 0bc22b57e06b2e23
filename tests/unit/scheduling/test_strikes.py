import pytest

from solrl_ray.errors import RunError
from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.strikes import Strikes

NAN = "explorer-1 answered with rewards (nan,)"


def unit(number: int) -> WorkUnit:
    return WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=f"p{number}", indices=(0,))


def test_strikes_are_counted_by_worker() -> None:
    strikes = Strikes(3)
    assert [strikes.refuse("explorer-1", unit(n), NAN, alone=False) for n in range(3)] == [1, 2, 3]
    assert strikes.refuse("explorer-0", unit(9), NAN, alone=False) == 1
    assert strikes.limit == 3


def test_nonsense_of_two_workers_for_one_unit_is_the_runs_fault_also_from_a_replacement() -> None:
    strikes = Strikes(3)
    strikes.answered("explorer-1")
    assert strikes.refuse("explorer-1", unit(0), NAN, alone=True) == 1
    assert strikes.refuse("explorer-1", unit(0), NAN, alone=True) == 2
    with pytest.raises(
        RunError,
        match=r"^explore \(iteration 1, prompt p0, .*\) was refused from explorer-1 and from explorer-1\.1: NaN$",
    ):
        strikes.refuse("explorer-1.1", unit(0), "NaN", alone=False)


def test_who_is_alone_and_was_never_right_ends_the_run_at_once() -> None:
    with pytest.raises(
        RunError, match=r"prompt p0, .*\) was refused from explorer-0, which is alone and was never right: NaN"
    ):
        Strikes(3).refuse("explorer-0", unit(0), "NaN", alone=True)
