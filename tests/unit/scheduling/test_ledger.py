import random

import pytest

from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.ledger import Ledger, Outcome


def unit(number: int) -> WorkUnit:
    return WorkUnit(stage="explore", iteration=1, revision=1, prompt_id=f"p{number}", indices=(0, 1))


def test_units_are_leased_in_the_order_they_were_planned() -> None:
    ledger = Ledger([unit(0), unit(1), unit(2)])
    assert [ledger.lease("a").prompt_id for _ in range(3)] == ["p0", "p1", "p2"]
    assert ledger.lease("a") is None


def test_units_for_workers_of_a_kind_wait_for_them_alone() -> None:
    ledger = Ledger([unit(0)])
    ledger.add(unit(1), "l40s")
    ledger.add(unit(2), "l40s")
    assert ledger.lease("a") == unit(0)
    assert ledger.lease("a") is None
    assert not ledger.all_out
    assert ledger.lease("b", "l40s") == unit(1)
    assert ledger.release("b") == (unit(1).id,)
    assert ledger.lease("a") is None
    assert [ledger.lease("c", "l40s") for _ in range(3)] == [unit(1), unit(2), None]
    ledger.finish(unit(1).id, "x")
    ledger.redo(unit(1).id)
    ledger.hold("d", unit(1).id)  # as after a restart
    assert ledger.all_out
    assert ledger.release("d") == (unit(1).id,)
    assert ledger.lease("c", "l40s") == unit(1)


def test_a_lost_workers_units_keep_their_ids_and_their_order_and_go_first() -> None:
    ledger = Ledger([unit(n) for n in range(4)])
    held = [ledger.lease("a"), ledger.lease("b"), ledger.lease("a")]
    assert ledger.release("a") == (held[0].id, held[2].id)
    assert [ledger.lease("c").prompt_id for _ in range(3)] == ["p0", "p2", "p3"]
    assert ledger.requeued == 2


def test_one_unit_of_a_worker_that_lives_on_is_taken_back_alone_and_only_once() -> None:
    ledger = Ledger([unit(n) for n in range(3)])
    ledger.lease("a")
    ledger.lease("a")
    assert not ledger.requeue(unit(1).id, "b")
    assert ledger.requeue(unit(1).id, "a")
    assert not ledger.requeue(unit(1).id, "a")
    assert ledger.requeued == 1
    assert ledger.lease("b") == unit(1)
    assert ledger.release("a") == (unit(0).id,)


def test_the_first_result_wins_and_equal_duplicates_fold_away() -> None:
    ledger = Ledger([unit(0)])
    ledger.lease("a")
    assert ledger.finish(unit(0).id, "x") is Outcome.ACCEPTED
    assert ledger.finish(unit(0).id, "x") is Outcome.DUPLICATE
    assert ledger.finish(unit(0).id, "y") is Outcome.VIOLATION
    assert (ledger.done, ledger.duplicates, ledger.violations) == (1, 2, 1)


def test_a_result_that_arrives_after_its_worker_was_given_up_is_accepted_once() -> None:
    ledger = Ledger([unit(0)])
    ledger.lease("a")
    ledger.release("a")
    assert ledger.finish(unit(0).id, "x") is Outcome.ACCEPTED
    assert ledger.lease("b") is None
    assert ledger.complete


def test_a_unit_that_was_never_planned_is_refused() -> None:
    with pytest.raises(KeyError, match="is not in this ledger of 1 units"):
        Ledger([unit(0)]).finish(unit(7).id, "x")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_dies_every_unit_is_done_exactly_once(seed: int) -> None:
    chance = random.Random(seed)
    ledger = Ledger([unit(n) for n in range(30)])
    holding: dict[str, list[WorkUnit]] = {}
    accepted: list[str] = []
    for _ in range(10_000):
        if ledger.complete:
            break
        worker = f"w{chance.randrange(4)}"
        action = chance.random()
        if action < 0.1:
            late = unit(chance.randrange(30))
            if ledger.hedge(worker, late.id):
                holding.setdefault(worker, []).append(late)
        elif action < 0.5 and (leased := ledger.lease(worker)):
            holding.setdefault(worker, []).append(leased)
        elif action < 0.85 and holding.get(worker):
            done = holding[worker].pop(0)
            if ledger.finish(done.id, done.id) is Outcome.ACCEPTED:
                accepted.append(done.id)
        elif action >= 0.85:
            ledger.release(worker)
            if chance.random() < 0.5:  # really dead; otherwise merely given up, and its answers still arrive
                holding.pop(worker, None)
    assert ledger.complete
    assert sorted(accepted) == sorted(unit(n).id for n in range(30))
    assert ledger.violations == 0


def test_a_unit_that_is_at_work_is_not_handed_out_again_until_its_worker_is_lost() -> None:
    ledger = Ledger([unit(0), unit(1)])
    ledger.hold("a", unit(1).id)
    ledger.hold("a", "explore/1/unknown/0-1")
    ledger.hold("c", unit(1).id)  # as a hedge
    assert [ledger.lease("b"), ledger.lease("b")] == [unit(0), None]
    assert ledger.release("a") == ()
    assert ledger.release("c") == (unit(1).id,)
    assert ledger.lease("b") == unit(1)


def test_a_unit_is_hedged_by_one_other_worker_only_while_it_is_out() -> None:
    ledger = Ledger([unit(0), unit(1)])
    assert not ledger.hedge("b", unit(0).id)
    ledger.lease("a")
    assert not ledger.hedge("a", unit(0).id)
    assert ledger.hedge("b", unit(0).id)
    assert not ledger.hedge("c", unit(0).id)
    assert ledger.finish(unit(0).id, "x", "b") is Outcome.ACCEPTED
    assert not ledger.hedge("c", unit(0).id)
    assert ledger.finish(unit(0).id, "x", "a") is Outcome.DUPLICATE
    assert ledger.finisher(unit(0).id) == "b"
    assert (ledger.release("a"), ledger.release("b"), ledger.requeued) == ((), (), 0)


@pytest.mark.parametrize(("lost", "left"), [("a", "b"), ("b", "a")])
def test_who_is_left_of_a_hedged_unit_has_it_alone_and_it_can_be_hedged_again(lost: str, left: str) -> None:
    ledger = Ledger([unit(0)])
    ledger.lease("a")
    ledger.hedge("b", unit(0).id)
    assert ledger.release(lost) == ()
    assert ledger.lease("d") is None
    assert ledger.hedge("c", unit(0).id)
    ledger.requeue(unit(0).id, "c")
    assert ledger.release(left) == (unit(0).id,)
    assert ledger.lease("d") == unit(0)
