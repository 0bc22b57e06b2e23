"""When a regenerator is lent and taken back: the share holds, whoever is silent has ended, one at a time."""

from __future__ import annotations

import random

import pytest

from solrl_ray.scheduling.lending import PATIENCE, SAVED, Lend, Lending, Loan, TakeBack

BOTH = ("regenerator-0", "regenerator-1")


def lending(share: float = 0.2) -> Lending:
    return Lending(share, now=0.0)


def out(one: Lending, now: float = 0.0, *, busy: bool = True) -> Loan:
    """Ask, be given and hold."""
    assert one.ask("a", now) is None
    action = one.tick(now, members=BOTH, ready=BOTH, busy=busy)
    assert isinstance(action, Lend)
    assert one.ask("a", now) is None, "the worker does not know of it yet"
    one.given()
    assert one.ask("a", now) == action.loan
    return action.loan


def test_a_loan_ends_at_a_units_end_once_the_account_is_empty_and_the_next_needs_a_full_one() -> None:
    one = lending()
    loan = out(one)
    assert loan == Loan(number=1, worker="regenerator-0")
    end = SAVED / (1 - 0.2 * 2)  # it earns while it spends
    one.renew("a", end - 0.1)
    assert one.tick(end - 0.1, members=BOTH, ready=BOTH[1:], busy=True) is None
    assert one.ask("a", end - 0.1) == loan
    assert one.tick(end + 3.0, members=BOTH, ready=BOTH[1:], busy=True) is None, "a unit is still at work"
    assert one.ask("a", end + 3.0) is None
    assert one.tick(end + 3.0, members=BOTH, ready=BOTH[1:], busy=True) == TakeBack(loan)
    assert one.tick(end + 5.0, members=BOTH, ready=BOTH[1:], busy=True) is None, "it is loading the run's revision"
    assert one.account == pytest.approx(-5.0 * 0.6)  # a debt
    assert one.tick(end + 5.0, members=BOTH, ready=BOTH, busy=True) is None, "ready again"
    assert one.ask("a", end + 6.0) is None
    full = end + 5.0 + (SAVED + 3.0) / 0.4
    for now in (full - 20.0, full - 0.1):
        one.ask("a", now)
        assert one.tick(now, members=BOTH, ready=BOTH, busy=True) is None
    assert one.tick(full + 0.1, members=BOTH, ready=BOTH, busy=True) == Lend(Loan(2, "regenerator-0"))


def test_without_work_a_loan_costs_nothing_and_begins_with_what_is_there() -> None:
    one = lending()
    loan = out(one, busy=False)
    for now in range(25, 1001, 25):
        one.tick(now, members=BOTH, ready=BOTH[1:], busy=False)
        assert one.ask("a", now) == loan
    assert one.account == SAVED
    # Work arrives: now it is paid for.
    one.renew("a", 1050.0)
    one.tick(1050.0, members=BOTH, ready=BOTH[1:], busy=True)
    assert one.account == pytest.approx(0.0)
    assert one.ask("a", 1050.0) is None


def test_a_debt_is_paid_before_anything_is_lent_even_without_work() -> None:
    one = lending()
    out(one)
    one.tick(60.0, members=BOTH, ready=(), busy=True)
    assert one.account == pytest.approx(-6.0)
    one.done("a")
    one.tick(60.0, members=BOTH, ready=(), busy=True)
    one.tick(60.0, members=BOTH, ready=BOTH, busy=True)
    one.ask("b", 60.0)
    assert one.tick(74.0, members=BOTH, ready=BOTH, busy=False) is None
    assert isinstance(one.tick(75.1, members=BOTH, ready=BOTH, busy=False), Lend)


@pytest.mark.parametrize("busy", [False, True])
def test_whoever_is_silent_or_done_has_ended_and_a_request_that_waits_is_forgotten(busy: bool) -> None:
    one = lending()
    loan = out(one)
    one.ask("b", 1.0)
    one.renew("a", PATIENCE)  # its worker is at a unit
    assert one.tick(PATIENCE + 2.0, members=BOTH, ready=(), busy=busy) is None
    one.renew("b", PATIENCE + 2.0)  # too late: it waited in silence
    assert one.tick(2 * PATIENCE, members=BOTH, ready=(), busy=busy) is None
    assert one.tick(2 * PATIENCE + 1.0, members=BOTH, ready=(), busy=busy) == TakeBack(loan), "without another question"
    assert one.ask("a", 2 * PATIENCE + 1.0) is None
    one.tick(2 * PATIENCE + 2.0, members=BOTH, ready=BOTH, busy=busy)
    one.done("a")
    assert one.tick(2 * PATIENCE + 3.0, members=BOTH, ready=BOTH, busy=busy) is None, "nobody is remembered"
    assert not one.active


def test_a_borrower_that_is_gone_before_the_worker_knows_is_not_waited_for() -> None:
    one = lending()
    one.ask("a", 0.0)
    action = one.tick(0.0, members=BOTH, ready=BOTH, busy=False)
    assert isinstance(action, Lend)
    one.done("a")
    one.given()
    assert one.tick(0.1, members=BOTH, ready=(), busy=False) == TakeBack(action.loan)


def test_a_lent_worker_that_is_lost_is_forgotten_and_another_is_lent() -> None:
    one = lending()
    out(one)
    left = ("regenerator-0.1", "regenerator-1")
    assert one.tick(1.0, members=left, ready=BOTH[1:], busy=False) is None
    assert one.ask("a", 1.0) is None
    assert one.tick(1.0, members=left, ready=BOTH[1:], busy=False) == Lend(Loan(2, "regenerator-1"))


def test_requests_are_served_one_after_the_other() -> None:
    one = lending()
    loan = out(one, busy=False)
    one.ask("b", 1.0)
    assert one.tick(1.0, members=BOTH, ready=BOTH[1:], busy=False) is None
    one.done("b")
    one.ask("b", 2.0)
    one.done("a")
    assert one.tick(2.0, members=BOTH, ready=BOTH[1:], busy=False) == TakeBack(loan)
    one.tick(3.0, members=BOTH, ready=BOTH, busy=False)
    one.tick(3.0, members=BOTH, ready=BOTH, busy=False)
    one.given()
    assert one.ask("a", 3.0) is None
    assert one.ask("b", 3.0) == Loan(2, "regenerator-0")


def test_in_the_learners_turn_nothing_is_lent_and_what_is_lent_is_taken_back() -> None:
    one = lending()
    loan = out(one, busy=False)
    assert one.tick(1.0, members=BOTH, ready=(), busy=False, closed=True) == TakeBack(loan)
    one.tick(2.0, members=BOTH, ready=BOTH, busy=False, closed=True)
    one.ask("a", 2.0)
    assert one.tick(2.0, members=BOTH, ready=BOTH, busy=False, closed=True) is None
    assert isinstance(one.tick(3.0, members=BOTH, ready=BOTH, busy=False), Lend)


def test_a_share_of_nothing_lends_nothing() -> None:
    one = lending(0.0)
    one.ask("a", 0.0)
    assert one.tick(0.0, members=BOTH, ready=BOTH, busy=False) is None


@pytest.mark.parametrize("seed", range(5))
def test_over_a_long_time_no_more_than_the_share_is_taken(seed: int) -> None:
    """A busy run with one to three regenerators, units and loads of random lengths."""
    rng = random.Random(seed)
    members = tuple(f"regenerator-{i}" for i in range(rng.randint(1, 3)))
    share, unit, load = rng.uniform(0.05, 0.4), rng.uniform(0.5, 20.0), rng.uniform(0.5, 5.0)
    one = Lending(share, now=0.0)
    now, taken, ready_at, unit_ends, loan = 0.0, 0.0, 0.0, 0.0, None
    while now < 20_000.0:
        now += 0.5
        taken += 0.5 * (loan is not None or now < ready_at)
        if loan is None or now >= unit_ends:
            held = one.ask("a", now)
            unit_ends = now + unit if held is not None else unit_ends
        ready = members if loan is None and now >= ready_at else members[1:]
        action = one.tick(now, members=members, ready=ready, busy=True)
        if isinstance(action, Lend):
            loan, unit_ends = action.loan, now + load
            one.given()
        elif isinstance(action, TakeBack):
            loan, ready_at = None, now + load
    assert taken <= share * len(members) * now + SAVED + unit + load + 2.0
    assert taken > 0.5 * share * len(members) * now
