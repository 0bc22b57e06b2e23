"""What share of their time workers only wait for weights."""

from __future__ import annotations

import pytest

from actors.fleet.fleet import Waits


def test_waits_are_shares_of_all_workers_time_and_asked_for_once() -> None:
    waits = Waits()
    waits.add(2.0, until=12.0)
    waits.add(4.0, until=14.0)
    assert waits.share(began=10.0, ended=20.0, workers=3) == pytest.approx(6.0 / 30.0)
    assert waits.share(began=20.0, ended=30.0, workers=3) == 0.0


def test_what_was_waited_before_the_iteration_began_is_not_counted() -> None:
    waits = Waits()
    waits.add(8.0, until=11.0)
    waits.add(8.0, until=9.0)
    assert waits.share(began=10.0, ended=20.0, workers=1) == pytest.approx(0.1)


def test_an_iteration_without_time_or_workers_has_no_share() -> None:
    assert Waits().share(began=1.0, ended=1.0, workers=2) == 0.0
    assert Waits().share(began=1.0, ended=2.0, workers=0) == 0.0
