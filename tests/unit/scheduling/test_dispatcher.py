"""Which unit goes to which worker: order, revisions, limits, losses, late units, refused answers."""

from __future__ import annotations

import random

import pytest
from solrl_ray.scheduling.hedging import ENOUGH, FLOOR

from solrl_ray.errors import RunError
from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.dispatcher import HEDGE_LOOK, Dispatcher

OLD = ("old", 0)


def unit(number: int, *, revision: int = 0, policy: str = "old", stage: str = "explore") -> WorkUnit:
    return WorkUnit(
        stage=stage, iteration=revision, revision=revision, prompt_id=f"p{number:03}", indices=(0, 1), policy=policy
    )


def dispatcher(*, max_inflight: int = 2, hedge: float = 0.0) -> Dispatcher:
    return Dispatcher(max_inflight=max_inflight, hedge=hedge)


def given(it: Dispatcher, now: float = 0.0) -> list[tuple[str, str]]:
    return [(each.worker, each.unit.prompt_id) for each in it.assign(now)]


def test_units_go_out_in_order_first_ones_to_all_before_second_ones() -> None:
    it = dispatcher()
    it.add([unit(n) for n in range(5)], batch="i", pool="explorers")
    it.ready("explorer-0", "explorers", OLD)
    it.ready("explorer-1", "explorers", OLD)
    assert given(it) == [("explorer-0", "p000"), ("explorer-1", "p001"), ("explorer-0", "p002"), ("explorer-1", "p003")]
    assert it.waiting("i") == 1
    it.answered("explorer-1", unit(1), now=1.0, seconds=1.0)
    assert given(it, 1.0) == [("explorer-1", "p004")]


def with_one_that_loads(units: int) -> Dispatcher:
    """As many units, explorer-0, which is ready, and explorer-1, which loads the next revision."""
    it = dispatcher()
    it.ready("explorer-1", "explorers", OLD)
    it.not_ready("explorer-1")
    it.add([unit(n) for n in range(units)], batch="i", pool="explorers")
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
    it.answered("explorer-0", unit(0), now=1.0, seconds=1.0)
    assert given(it, 1.0) == [("explorer-0", "p002")]
    it.answered("explorer-0", unit(1), now=2.0, seconds=1.0)
    assert given(it, 2.0) == []  # it has one, and the other is for the one that may come
    it.answered("explorer-0", unit(2), now=3.0, seconds=1.0)
    assert given(it, 3.0) == [("explorer-0", "p003")]
    assert not it.waiting("i")


def test_the_last_units_do_not_wait_for_a_worker_that_is_lost() -> None:
    it = with_one_that_loads(2)
    assert given(it) == [("explorer-0", "p000")]
    assert it.lost("explorer-1") == []
    assert given(it) == [("explorer-0", "p001")]


def test_a_worker_only_gets_units_of_the_revision_that_it_holds() -> None:
    it = dispatcher()
    it.add([unit(0, revision=1)], batch="next", pool="explorers")
    it.add([unit(1)], batch="now", pool="explorers")
    it.ready("explorer-0", "explorers", OLD)
    assert given(it) == [("explorer-0", "p001")]
    it.not_ready("explorer-0")
    it.answered("explorer-0", unit(1), now=1.0, seconds=1.0)
    assert given(it) == []
    it.ready("explorer-0", "explorers", ("old", 1))
    assert given(it) == [("explorer-0", "p000")]


def test_a_pool_does_not_do_the_units_of_another_one() -> None:
    it = dispatcher()
    it.add([unit(0)], batch="i", pool="explorers_l40s")
    it.ready("explorer-0", "explorers", OLD)
    assert given(it) == []
    it.ready("explorer_l40s-0", "explorers_l40s", OLD)
    assert given(it) == [("explorer_l40s-0", "p000")]


def test_units_of_a_lower_priority_number_go_first_and_a_batch_says_what_must_be_held() -> None:
    it = dispatcher()
    it.add([unit(0, stage="regenerate")], batch="i", pool="regenerators", priority=1)
    it.add([unit(1, stage="regenerate")], batch="i", pool="regenerators")
    it.add([unit(2, policy="real", stage="evaluate")], batch="e", pool="regenerators", holds=OLD, priority=2)
    it.ready("regenerator-0", "regenerators", OLD)
    assert given(it) == [("regenerator-0", "p001"), ("regenerator-0", "p000")]
    it.answered("regenerator-0", unit(1, stage="regenerate"), now=0.0, seconds=1.0)
    assert given(it) == [("regenerator-0", "p002")]


def test_what_a_lost_worker_had_goes_first_to_others_and_is_counted() -> None:
    it = dispatcher()
    it.add([unit(n) for n in range(3)], batch="i", pool="explorers")
    it.ready("explorer-0", "explorers", OLD)
    assert given(it) == [("explorer-0", "p000"), ("explorer-0", "p001")]
    assert [each.prompt_id for each in it.lost("explorer-0")] == ["p000", "p001"]
    assert it.requeued["i"] == 2
    it.ready("explorer-0.1", "explorers", OLD)
    assert given(it) == [("explorer-0.1", "p000"), ("explorer-0.1", "p001")]


def test_an_answered_unit_is_given_to_nobody_until_it_is_judged() -> None:
    it = dispatcher()
    it.add([unit(0)], batch="i", pool="explorers")
    it.ready("explorer-0", "explorers", OLD)
    given(it)
    it.answered("explorer-0", unit(0), now=1.0, seconds=1.0)
    assert given(it) == []
    assert it.lost("explorer-0") == []
    it.requeue(unit(0), "explorer-0")
    it.ready("explorer-1", "explorers", OLD)
    assert given(it) == [("explorer-1", "p000")]
    it.answered("explorer-1", unit(0), now=2.0, seconds=1.0)
    it.done(unit(0))
    it.requeue(unit(0), "explorer-1")
    assert given(it) == []


def late(it: Dispatcher) -> float:
    """Two idle workers, one with a unit that is out for too long by the time that is returned."""
    it.add([unit(n) for n in range(ENOUGH + 1)], batch="i", pool="explorers")
    for n in range(2):
        it.ready(f"explorer-{n}", "explorers", OLD)
    now = 0.0
    assert given(it, now) == [("explorer-0", "p000"), ("explorer-1", "p001")]
    for n in range(ENOUGH):
        it.answered("explorer-1", unit(n + 1), now=now, seconds=1.0)
        it.done(unit(n + 1))
        given(it, now)
    return FLOOR + HEDGE_LOOK


def test_an_idle_worker_does_a_late_unit_as_well_and_keeps_it_if_the_first_is_lost() -> None:
    it = dispatcher(max_inflight=1, hedge=3.0)
    now = late(it)
    (hedge,) = it.assign(now)
    assert (hedge.worker, hedge.unit.prompt_id, hedge.hedge) == ("explorer-1", "p000", True)
    assert it.assign(now + HEDGE_LOOK) == []
    assert it.lost("explorer-0") == []  # the second one still has it
    assert it.requeued["i"] == 0


def test_nothing_is_late_while_units_wait_or_without_hedging() -> None:
    it = dispatcher(max_inflight=1)
    assert it.assign(late(it)) == []
    assert it.hedge_look(0.0) is None
    it = dispatcher(max_inflight=1, hedge=3.0)
    now = late(it)
    it.add([unit(9, revision=1)], batch="next", pool="explorers")  # nobody holds its revision yet
    assert it.assign(now) == []


def test_a_second_answer_of_a_hedged_unit_frees_its_slot() -> None:
    it = dispatcher(max_inflight=1, hedge=3.0)
    it.assign(late(it))
    it.answered("explorer-1", unit(0), now=9.0, seconds=1.0)
    it.done(unit(0))
    it.add([unit(7), unit(8)], batch="i", pool="explorers")
    assert given(it) == [("explorer-1", "p007")]
    it.answered("explorer-0", unit(0), now=9.0, seconds=9.0)
    assert given(it) == [("explorer-0", "p008")]


def test_an_error_in_a_unit_frees_its_slot_and_is_neither_a_time_nor_a_right_answer() -> None:
    it = dispatcher(max_inflight=1, hedge=3.0)
    it.add([unit(n) for n in range(ENOUGH + 1)], batch="i", pool="explorers")
    for n in range(2):
        it.ready(f"explorer-{n}", "explorers", OLD)
    assert given(it) == [("explorer-0", "p000"), ("explorer-1", "p001")]
    for n in range(ENOUGH):
        it.failed("explorer-1", unit(n + 1), now=0.0)
        it.done(unit(n + 1))
        given(it)
    assert it.assign(FLOOR + HEDGE_LOOK) == []  # nothing says how long a unit takes
    with pytest.raises(RunError, match="which is alone and was never right"):
        it.refuse("explorer-1", unit(1), "NaN", now=1.0, alone=True)


def test_refused_answers_are_strikes_and_the_unit_goes_to_another_worker() -> None:
    it = dispatcher(max_inflight=1)
    it.add([unit(0), unit(1)], batch="i", pool="explorers")
    it.ready("explorer-0", "explorers", OLD)
    given(it)
    assert it.refuse("explorer-0", unit(0), "NaN", now=1.0, alone=False) == 1
    given(it)
    assert it.refuse("explorer-0", unit(0), "NaN", now=1.0, alone=False) == 2
    it.not_ready("explorer-0")
    it.ready("explorer-0.1", "explorers", OLD)  # a replacement is another worker
    assert given(it) == [("explorer-0.1", "p000")]
    with pytest.raises(RunError, match=r"was refused from explorer-0 and from explorer-0\.1: NaN$"):
        it.refuse("explorer-0.1", unit(0), "NaN", now=2.0, alone=False)


def test_a_refused_answer_of_one_that_is_alone_and_was_right_before_is_a_strike() -> None:
    it = dispatcher(max_inflight=1)
    it.add([unit(0), unit(1)], batch="i", pool="explorers")
    it.ready("explorer-0", "explorers", OLD)
    given(it)
    it.answered("explorer-0", unit(0), now=1.0, seconds=1.0)
    it.done(unit(0))
    given(it)
    assert it.refuse("explorer-0", unit(1), "NaN", now=2.0, alone=True) == 1


def test_withdrawn_and_dropped_units_are_given_to_nobody() -> None:
    it = dispatcher(max_inflight=1)
    it.add([unit(n) for n in range(3)], batch="e", pool="explorers")
    it.ready("explorer-0", "explorers", OLD)
    given(it)
    it.withdraw("e")
    assert (it.waiting("e"), it.out("e")) == (0, 1)
    it.answered("explorer-0", unit(0), now=1.0, seconds=1.0)
    assert (given(it), it.out("e")) == ([], 1)
    it.drop("e")
    assert it.out("e") == 0
    it.add([unit(1)], batch="e", pool="explorers")
    assert given(it) == [("explorer-0", "p001")]


@pytest.mark.parametrize("seed", range(30))
def test_every_unit_is_done_once_whatever_happens_to_the_workers(seed: int) -> None:
    """Workers come, change revisions, die and answer in random order; invariants hold at every step."""
    rng = random.Random(seed)
    it = dispatcher(max_inflight=rng.choice([1, 2, 3]), hedge=rng.choice([0.0, 3.0]))
    wanted = {each.id: each for each in (unit(n, revision=rng.choice([0, 1])) for n in range(40))}
    it.add(wanted.values(), batch="i", pool="explorers")
    holds: dict[str, int | None] = {}
    out: list[tuple[str, WorkUnit]] = []
    done: set[str] = set()
    now, born = 0.0, 0
    while len(done) < len(wanted):
        now += rng.choice([0.0, 0.1, 10.0])
        for each in it.assign(now):
            assert holds[each.worker] == each.unit.revision
            assert each.unit.id not in done
            holders = [worker for worker, held in out if held.id == each.unit.id]
            assert len(holders) == int(each.hedge)
            assert each.worker not in holders
            out.append((each.worker, each.unit))
        event = rng.random()
        if event < 0.2 and len(holds) < 4:
            born += 1
            holds[f"explorer-{born}"] = rng.choice([0, 1])
            it.ready(f"explorer-{born}", "explorers", ("old", holds[f"explorer-{born}"] or 0))
        elif event < 0.3 and holds:
            worker = rng.choice(sorted(holds))
            it.lost(worker)
            del holds[worker]
            out = [(name, held) for name, held in out if name != worker]
        elif event < 0.5 and holds:
            worker = rng.choice(sorted(holds))
            holds[worker] = rng.choice([0, 1])
            it.not_ready(worker)
            it.ready(worker, "explorers", ("old", holds[worker] or 0))
        elif out:
            worker, held = out.pop(rng.randrange(len(out)))
            if rng.random() < 0.9:
                it.answered(worker, held, now=now, seconds=1.0)
                it.done(held)
                done.add(held.id)
            else:
                it.answered(worker, held, now=now, seconds=1.0)
                if held.id not in done:
                    it.requeue(held, worker)
    assert it.waiting("i") == it.out("i") == 0


def test_nobody_looks_for_late_units_of_workers_that_are_lost() -> None:
    it = dispatcher(hedge=2.0)
    it.ready("explorer-0", "explorers", OLD)
    it.add([unit(0), unit(1)], batch="i", pool="explorers")
    assert len(given(it)) == 2
    assert it.hedge_look(0.0) is not None
    assert len(it.lost("explorer-0")) == 2
    assert it.hedge_look(0.0) is None
    assert it.units_of("explorer-0") == []
    assert it.waiting("i") == 2
