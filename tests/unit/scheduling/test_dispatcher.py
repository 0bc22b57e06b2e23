"""Which unit goes to which worker: order, revisions, limits, losses, units that are forgotten."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.dispatcher import Dispatcher

OLD = ("old", 0)


def unit(number: int, *, revision: int = 0, policy: str = "old", stage: str = "explore") -> WorkUnit:
    return WorkUnit(
        stage=stage, iteration=revision, revision=revision, prompt_id=f"p{number:03}", indices=(0, 1), policy=policy
    )


def dispatcher(*units: int, max_inflight: int = 2) -> Dispatcher:
    """One with explorers' units of these numbers, which are also their orders."""
    it = Dispatcher(max_inflight=max_inflight)
    for number in units:
        it.add(unit(number), pool="explorers", order=(number,))
    return it


def given(it: Dispatcher) -> list[tuple[str, str]]:
    return [(each.worker, each.unit.prompt_id) for each in it.assign()]


def test_units_go_out_in_order_first_ones_to_all_before_second_ones() -> None:
    it = dispatcher(3, 0, 4, 1, 2)
    it.ready("explorer-0", "explorers", OLD)
    it.ready("explorer-1", "explorers", OLD)
    assert given(it) == [("explorer-0", "p000"), ("explorer-1", "p001"), ("explorer-0", "p002"), ("explorer-1", "p003")]
    assert it.waiting() == 1
    it.answered("explorer-1", unit(1))
    assert given(it) == [("explorer-1", "p004")]


def with_one_that_loads(units: int) -> Dispatcher:
    """As many units, explorer-0, which is ready, and explorer-1, which loads the next revision."""
    it = dispatcher(*range(units))
    it.ready("explorer-1", "explorers", OLD)
    it.not_ready("explorer-1")
    it.ready("explorer-0", "explorers", OLD)
    return it


def test_the_last_units_wait_for_workers_that_are_about_to_be_ready() -> None:
    it = with_one_that_loads(2)
    assert given(it) == [("explorer-0", "p000")]
    it.ready("explorer-1", "explorers", OLD)  # a moment later
    assert given(it) == [("explorer-1", "p001")]


def test_the_last_units_go_to_those_who_are_free_if_nobody_else_comes() -> None:
    it = with_one_that_loads(4)
    assert given(it) == [("explorer-0", "p000"), ("explorer-0", "p001")]
    it.answered("explorer-0", unit(0))
    assert given(it) == [("explorer-0", "p002")]
    it.answered("explorer-0", unit(1))
    assert given(it) == []  # it has one, and the other is for the one that may come
    it.answered("explorer-0", unit(2))
    assert given(it) == [("explorer-0", "p003")]
    assert not it.waiting()


def test_the_last_units_do_not_wait_for_a_worker_that_is_lost() -> None:
    it = with_one_that_loads(2)
    assert given(it) == [("explorer-0", "p000")]
    assert it.lost("explorer-1") == []
    assert given(it) == [("explorer-0", "p001")]


def test_a_worker_only_gets_units_of_the_revision_that_it_holds() -> None:
    it = dispatcher(1)
    it.add(unit(0, revision=1), pool="explorers", order=(0,))
    it.ready("explorer-0", "explorers", OLD)
    assert given(it) == [("explorer-0", "p001")]
    it.not_ready("explorer-0")
    it.answered("explorer-0", unit(1))
    assert given(it) == []
    it.ready("explorer-0", "explorers", ("old", 1))
    assert given(it) == [("explorer-0", "p000")]


def test_a_pool_does_not_do_the_units_of_another_one() -> None:
    it = Dispatcher(max_inflight=2)
    it.add(unit(0), pool="regenerators", order=(0,))
    it.ready("explorer-0", "explorers", OLD)
    assert given(it) == []
    it.ready("regenerator-0", "regenerators", OLD)
    assert given(it) == [("regenerator-0", "p000")]


def test_units_of_a_lower_order_go_first_and_a_request_may_say_what_must_be_held() -> None:
    it = Dispatcher(max_inflight=2)
    it.add(unit(0, stage="regenerate"), pool="regenerators", order=(5, 0, 1))
    it.add(unit(1, stage="regenerate"), pool="regenerators", order=(4, 7, 0))
    real = unit(2, policy="real", stage="evaluate")
    it.add(real, pool="regenerators", order=(9,), holds=OLD)
    it.ready("regenerator-0", "regenerators", OLD)
    assert given(it) == [("regenerator-0", "p001"), ("regenerator-0", "p000")]
    it.answered("regenerator-0", unit(1, stage="regenerate"))
    assert given(it) == [("regenerator-0", "p002")]


def test_units_of_a_lost_worker_go_to_others_before_later_ones() -> None:
    it = dispatcher(0, 1, 2)
    it.ready("explorer-0", "explorers", OLD)
    assert given(it) == [("explorer-0", "p000"), ("explorer-0", "p001")]
    assert [each.prompt_id for each in it.lost("explorer-0")] == ["p000", "p001"]
    assert it.units_of("explorer-0") == []
    assert it.waiting() == 3
    it.ready("explorer-0.1", "explorers", OLD)
    assert given(it) == [("explorer-0.1", "p000"), ("explorer-0.1", "p001")]


def test_a_unit_that_is_added_again_goes_before_later_ones() -> None:
    it = dispatcher(0, 1, 2, max_inflight=1)
    it.ready("explorer-0", "explorers", OLD)
    assert given(it) == [("explorer-0", "p000")]
    it.answered("explorer-0", unit(0))  # an answer that is refused
    it.add(unit(0), pool="explorers", order=(0,))
    assert given(it) == [("explorer-0", "p000")]
    it.answered("explorer-0", unit(0))
    assert given(it) == [("explorer-0", "p001")]


def test_an_answered_unit_is_given_to_nobody_and_frees_its_slot() -> None:
    it = dispatcher(0, max_inflight=1)
    it.ready("explorer-0", "explorers", OLD)
    given(it)
    it.add(unit(0), pool="explorers", order=(0,))  # it has no answer yet: this changes nothing
    it.answered("explorer-0", unit(0))
    assert (given(it), it.waiting()) == ([], 0)
    assert it.lost("explorer-0") == []


def test_a_forgotten_unit_is_given_to_nobody_and_keeps_its_slot_until_it_is_answered() -> None:
    it = dispatcher(0, 1, 2, max_inflight=1)
    it.ready("explorer-0", "explorers", OLD)
    assert given(it) == [("explorer-0", "p000")]
    it.forget(unit(0))
    it.forget(unit(1))
    assert (given(it), it.waiting()) == ([], 1)
    assert it.units_of("explorer-0") == [unit(0)]
    it.answered("explorer-0", unit(0))
    assert given(it) == [("explorer-0", "p002")]


def test_a_forgotten_unit_of_a_lost_worker_does_not_return() -> None:
    it = dispatcher(0, 1)
    it.ready("explorer-0", "explorers", OLD)
    given(it)
    it.forget(unit(0))
    assert it.lost("explorer-0") == [unit(1)]


def test_a_late_answer_to_a_forgotten_unit_does_not_end_its_new_request() -> None:
    it = dispatcher(0, max_inflight=1)
    it.ready("explorer-0", "explorers", OLD)
    given(it)
    it.forget(unit(0))
    it.add(unit(0), pool="explorers", order=(0,))
    it.ready("explorer-1", "explorers", OLD)
    assert given(it) == [("explorer-1", "p000")]
    it.answered("explorer-0", unit(0))
    assert it.lost("explorer-1") == [unit(0)]
    assert given(it) == [("explorer-0", "p000")]


def test_a_worker_that_has_a_unit_twice_returns_it_once_when_it_is_lost() -> None:
    it = dispatcher(0)
    it.ready("w0", "explorers", holds=("old", 0))
    assert given(it) == [("w0", "p000")]
    it.forget(unit(0))
    it.add(unit(0), pool="explorers", order=(0,))
    assert given(it) == [("w0", "p000")]
    assert it.units_of("w0") == [unit(0)] * 2
    assert it.lost("w0") == [unit(0)]
    assert it.waiting() == 1


def test_a_lost_worker_does_not_return_a_unit_that_another_one_has_by_now() -> None:
    it = dispatcher(0)
    it.ready("w0", "explorers", holds=OLD)
    given(it)
    it.forget(unit(0))
    it.ready("w1", "explorers", holds=OLD)
    it.add(unit(0), pool="explorers", order=(0,))
    assert given(it) == [("w1", "p000")]
    assert it.lost("w0") == []
    assert (it.waiting(), it.units_of("w1")) == (0, [unit(0)])


def test_a_late_answer_to_a_unit_of_the_same_name_ends_no_other() -> None:
    it = dispatcher(0)
    it.ready("w0", "explorers", holds=("old", 0))
    given(it)
    it.forget(unit(0))
    newer = replace(unit(0), revision=1)
    it.add(newer, pool="explorers", order=(0,))
    it.ready("w0", "explorers", holds=("old", 1))
    assert given(it) == [("w0", "p000")]
    it.answered("w0", unit(0))
    assert it.lost("w0") == [newer]


def test_a_unit_that_is_added_again_needs_what_it_is_added_with() -> None:
    it = Dispatcher(max_inflight=1)
    it.add(unit(0), pool="explorers", order=(0,), holds=("old", 1))
    it.forget(unit(0))
    it.add(unit(0), pool="explorers", order=(0,), holds=("old", 2))
    it.ready("explorer-1", "explorers", ("old", 1))
    assert given(it) == []
    it.ready("explorer-2", "explorers", ("old", 2))
    assert given(it) == [("explorer-2", "p000")]


class Chance:
    """Workers come, change revisions, die and answer in random order, and units are forgotten and added again."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.inflight = self._rng.choice([1, 2, 3])
        self.it = Dispatcher(max_inflight=self.inflight)
        self.wanted = [unit(n, revision=self._rng.choice([0, 1])) for n in range(40)]
        self._orders = {each.id: (self._rng.randrange(5), n) for n, each in enumerate(self.wanted)}
        self.holds: dict[str, int] = {}
        self.out: list[tuple[str, WorkUnit]] = []
        self.done: set[str] = set()
        self._born = 0
        for each in self.wanted:
            self.add(each)

    def add(self, each: WorkUnit) -> None:
        self.it.add(each, pool="explorers", order=self._orders[each.id])

    def waiting(self) -> list[WorkUnit]:
        """By order."""
        out = [held for _, held in self.out]
        waiting = [each for each in self.wanted if each.id not in self.done and each not in out]
        return sorted(waiting, key=lambda each: self._orders[each.id])

    def of(self, worker: str) -> list[WorkUnit]:
        return [held for name, held in self.out if name == worker]

    def happen(self) -> None:
        worker, chance = (self._rng.choice(sorted(self.holds)) if self.holds else ""), self._rng.random()
        if chance < 0.2 and len(self.holds) < 4:
            self._born += 1
            self.ready(f"explorer-{self._born}")
        elif chance < 0.3 and worker:
            assert self.it.lost(worker) == self.of(worker)
            del self.holds[worker]
            self.out = [(name, held) for name, held in self.out if name != worker]
        elif chance < 0.5 and worker:
            self.it.not_ready(worker)
            self.ready(worker)
        elif chance < 0.6 and (waiting := self.waiting()):
            self.it.forget(again := self._rng.choice(waiting))
            self.add(again)
        elif self.out:
            self.answer(*self.out.pop(self._rng.randrange(len(self.out))))

    def ready(self, worker: str) -> None:
        self.holds[worker] = self._rng.choice([0, 1])
        self.it.ready(worker, "explorers", ("old", self.holds[worker]))

    def answer(self, worker: str, held: WorkUnit) -> None:
        """One of ten answers is refused."""
        self.it.answered(worker, held)
        if self._rng.random() < 0.9:
            self.done.add(held.id)
        else:
            self.add(held)


@pytest.mark.parametrize("seed", range(30))
def test_every_unit_is_done_once_whatever_happens_to_the_workers(seed: int) -> None:
    """Invariants hold at every step."""
    chance = Chance(seed)
    while len(chance.done) < len(chance.wanted):
        before, found = chance.waiting(), chance.it.assign()
        for each in found:
            assert chance.holds[each.worker] == each.unit.revision
            assert each.unit in before
            chance.out.append((each.worker, each.unit))
        for revision in (0, 1):  # by order, and none twice
            given = [each.unit for each in found if each.unit.revision == revision]
            assert given == [each for each in before if each.revision == revision][: len(given)]
        for worker in chance.holds:
            assert chance.it.units_of(worker) == chance.of(worker)
            assert len(chance.of(worker)) <= chance.inflight
        assert chance.it.waiting() == len(chance.waiting())
        chance.happen()
    assert chance.it.waiting() == 0
