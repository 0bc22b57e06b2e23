"""Which results count: the first ones, whatever comes after them and whatever is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.ledger import Ledger, Outcome


def unit(number: int) -> WorkUnit:
    return WorkUnit(stage="explore", iteration=1, revision=1, prompt_id=f"p{number}", indices=(0, 1))


def test_units_are_wanted_in_the_order_they_were_planned_and_one_that_is_added_again_stays_what_it_is() -> None:
    ledger = Ledger([unit(2), unit(0)])
    ledger.add(unit(1))
    assert ledger.wanted() == [unit(2), unit(0), unit(1)]
    ledger.finish(unit(0).id, "x")
    ledger.add(unit(0))
    assert ledger.wanted() == [unit(2), unit(1)]


def test_a_unit_whose_work_is_lost_is_wanted_until_it_is_made_again_to_the_same_bytes() -> None:
    ledger = Ledger([unit(0), unit(1)])
    ledger.redo(unit(0).id)  # it has no result that could be lost
    assert not ledger.wants_again(unit(0).id)
    ledger.finish(unit(0).id, "x", "a")
    ledger.finish(unit(1).id, "x", "a")
    ledger.redo(unit(0).id)
    ledger.redo(unit(0).id)
    assert ledger.wanted() == [unit(0)]
    assert ledger.wants_again(unit(0).id)
    assert (bool(ledger.digest(unit(0).id)), ledger.complete) == (True, True)  # the result itself is known
    assert ledger.finish(unit(0).id, "y", "b") is Outcome.VIOLATION
    assert ledger.wants(unit(0).id)
    assert ledger.finish(unit(0).id, "x", "b") is Outcome.RESTORED
    assert (ledger.wanted(), ledger.finisher(unit(0).id)) == ([], "a")
    assert ledger.finish(unit(0).id, "x", "c") is Outcome.DUPLICATE
    assert (ledger.duplicates, ledger.violations) == (2, 1)


def test_a_unit_that_was_never_planned_is_refused() -> None:
    with pytest.raises(KeyError, match="is not in this ledger of 1 units"):
        Ledger([unit(0)]).finish(unit(7).id, "x")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["redo", "x", "x", "y"]))))
def test_whatever_comes_the_first_results_stay_and_what_is_lost_is_wanted(happened: list[tuple[int, str]]) -> None:
    ledger = Ledger([unit(n) for n in range(4)])
    first: dict[int, str] = {}
    lost: set[int] = set()
    outcomes = []
    for number, what in happened:
        if what == "redo":
            ledger.redo(unit(number).id)
            lost |= {number} & set(first)
            continue
        outcomes.append(ledger.finish(unit(number).id, what))
        if number not in first:
            expected, first[number] = Outcome.ACCEPTED, what
        elif first[number] != what:
            expected = Outcome.VIOLATION
        else:
            expected = Outcome.RESTORED if number in lost else Outcome.DUPLICATE
            lost.discard(number)
        assert outcomes[-1] is expected
    assert {n: ledger.digest(unit(n).id) for n in first} == first
    assert ledger.wanted() == [unit(n) for n in range(4) if n not in first or n in lost]
    assert ledger.complete is (len(first) == 4)
    assert ledger.violations == outcomes.count(Outcome.VIOLATION)
    assert ledger.duplicates == ledger.violations + outcomes.count(Outcome.DUPLICATE)
