import itertools
import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from solrl_ray.errors import RunError
from solrl_ray.records import Pruning, SampleGroup, Selection, UnitResult, WorkUnit
from solrl_ray.rollout.selection import SelectionRule, dropped
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationState, plan_iteration
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.storage.journal_entries import plan_entry
from tests.support import made_runs
from tests.support.made_configs import changed

PLAN = IterationPlan(iteration=4, revision=4, prompt_ids=("beef", "cafe"), pool=6, keep=4, unit=2)
REWARDS = {"beef": [0.1, 0.6, 0.3, 0.5, 0.2, 0.4], "cafe": [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]}


def result(unit: WorkUnit, worker: str = "explorer-0") -> UnitResult:
    rewards = tuple(REWARDS[unit.prompt_id][i] for i in unit.indices)
    return UnitResult(unit=unit, rewards=rewards, worker=worker, score_class="c", seconds=0.1)


def group(selection: Selection, shift: float = 0.0) -> SampleGroup:
    indices = tuple(c.index for c in selection.chosen)
    latents = torch.tensor([[float(i) + shift] for i in indices])
    return SampleGroup(
        iteration=4,
        revision=4,
        prompt_id=selection.prompt_id,
        indices=indices,
        rewards=tuple(REWARDS[selection.prompt_id][i] for i in indices),
        latents=latents,
    )


def explored(plan: IterationPlan = PLAN) -> IterationState:
    state = IterationState(plan)
    for unit in plan.pool_units():
        state.record(result(unit))
    return state


def test_the_plan_of_an_iteration_is_what_the_configuration_says() -> None:
    preview, run = {"prune": {"after": 2, "keep": 12}}, {"seed": 7}
    two_stage = changed(made_runs.config(), run=run, rollout={"max_staleness": 1, "preview": preview})
    given: dict[str, Any] = {"score_class": "s", "policy_digest": "d"}
    assert plan_iteration(two_stage, 3, ["b", "a"], **given) == IterationPlan(
        iteration=3,
        revision=3,
        staleness=1,
        prompt_ids=("b", "a"),
        pool=24,
        keep=8,
        unit=24,
        selection=SelectionRule(kind="best_worst", run_seed=7),
        prune=Pruning(after=2, keep=12),
        **given,
    )
    rewards = [{"kind": "clipscore", "path": "c", "weight": 0.5, "reproducible": False}]
    rollout = {"strategy": "scaled", "selection": "best", "regenerate": {"micro_batch": 8}}
    own = {"advantage": {"std": "gdpo"}}
    one_stage = changed(made_runs.config(), run=run, rollout=rollout, rewards=rewards, objective=own)
    assert plan_iteration(one_stage, 0, ["a"], **given) == IterationPlan(
        iteration=0,
        revision=0,
        prompt_ids=("a",),
        pool=24,
        keep=8,
        unit=8,
        selection=SelectionRule(kind="best", run_seed=7, reward_weights=(0.5,)),
        one_stage=True,
        reproducible=False,
        **given,
    )


def test_the_plan_covers_every_candidate_once_prompt_by_prompt() -> None:
    units = PLAN.pool_units()
    assert [u.prompt_id for u in units] == ["beef"] * 3 + ["cafe"] * 3
    assert list(itertools.chain(*(u.indices for u in units[:3]))) == list(range(6))
    assert units[1].id == "explore/4/beef/2-3"


def test_the_plan_says_by_which_rule_seeds_are_chosen_and_so_does_its_journal() -> None:
    plan = replace(PLAN, selection=SelectionRule(kind="best"))
    state = IterationState(plan)
    *_, (_, selection) = [state.record(result(unit)) for unit in plan.pool_units_of("beef")]
    assert [c.index for c in selection.chosen] == [1, 3, 2, 5]
    assert plan_entry(plan)["selection"] == {"kind": "best", "run_seed": 0}


def test_a_prompt_moves_on_with_its_last_unit_and_is_wanted_until_its_group_is_there() -> None:
    state = IterationState(PLAN)
    assert state.all_wanted() == tuple(PLAN.pool_units())
    first, second, third = PLAN.pool_units_of("beef")
    for unit, left in ((third, (first, second)), (first, (second,))):
        assert state.record(result(unit)) == (Outcome.ACCEPTED, None)
        assert state.wanted("beef") == left
    outcome, selection = state.record(result(second))
    assert outcome is Outcome.ACCEPTED
    assert ([c.index for c in selection.top], [c.index for c in selection.bottom]) == ([1, 3], [0, 4])
    (regenerate,) = state.wanted("beef")
    assert (regenerate.stage, regenerate.indices) == ("regenerate", (1, 3, 0, 4))
    assert state.all_wanted() == (regenerate, *PLAN.pool_units_of("cafe"))
    assert not state.complete
    state.record_group(group(selection))
    assert state.wanted("beef") == ()
    state.lose_group("beef")
    assert state.has_lost("beef")
    assert state.wanted("beef") == (regenerate,)
    assert state.record_group(group(selection)) is Outcome.RESTORED
    assert state.all_wanted() == tuple(PLAN.pool_units_of("cafe"))


@pytest.mark.parametrize("seed", range(10))
def test_arrival_order_and_duplicates_do_not_change_what_comes_out(seed: int) -> None:
    chance = random.Random(seed)
    arrivals = PLAN.pool_units() * 2
    chance.shuffle(arrivals)
    state, calm = IterationState(PLAN), explored()
    for number, unit in enumerate(arrivals):
        state.record(result(unit, worker=f"explorer-{number % 3}"))
    assert state.ordered_selections() == calm.ordered_selections()
    assert state.proxy_mean == calm.proxy_mean
    assert state.ledger.duplicates == 6
    assert [len({c.index for c in s.chosen}) for s in state.ordered_selections()] == [4, 4]


def test_an_iteration_is_complete_when_every_group_is_regenerated() -> None:
    state = explored()
    with pytest.raises(RunError, match="closed before it was complete"):
        state.close()
    for selection in state.ordered_selections():
        assert state.record_group(group(selection)) is Outcome.ACCEPTED
        assert state.record_group(group(selection)) is Outcome.DUPLICATE
        assert state.record_group(group(selection, shift=1.0)) is Outcome.VIOLATION
    closed = state.close()
    assert [s.prompt_id for s in closed.selections] == ["beef", "cafe"]
    assert closed.counts.candidates == 12
    assert closed.proxy_mean == pytest.approx((2.1 + 3.0) / 12)


def test_nonsense_is_refused_by_name() -> None:
    state = IterationState(PLAN)
    unit = PLAN.pool_units()[0]
    stale = WorkUnit(stage="explore", iteration=4, revision=3, prompt_id="beef", indices=(0, 1))
    with pytest.raises(ValueError, match="revision 3; expected iteration 5, revision 4"):
        state.record(result(stale))
    for rewards in ((0.1,), (0.1, float("nan")), (0.1, float("inf"))):
        bad = UnitResult(unit=unit, rewards=rewards, worker="explorer-1", score_class="c", seconds=0.1)
        with pytest.raises(
            ValueError, match=r"explorer-1 answered explore \(iteration 5, prompt beef, seeds 0 to 1\) with scores"
        ):
            state.record(bad)
    assert state.all_wanted() == tuple(PLAN.pool_units())


def test_samples_that_were_not_asked_for_are_refused() -> None:
    state = explored()
    selection = state.selections["beef"]
    reversed_group = SampleGroup(
        iteration=4,
        revision=4,
        prompt_id="beef",
        indices=tuple(c.index for c in selection.chosen)[::-1],
        rewards=(0.0,) * 4,
        latents=torch.zeros(4, 1),
    )
    with pytest.raises(ValueError, match=r"expected \(1, 3, 0, 4\) of revision 4"):
        state.record_group(reversed_group)
    with pytest.raises(ValueError, match="a latent that is not finite"):
        state.record_group(group(selection, shift=float("nan")))


PRUNED = replace(PLAN, keep=2, unit=6, prune=Pruning(after=2, keep=4))
EARLY = {"beef": [0.2, 0.5, 0.35, 0.9, 0.3, 0.1], "cafe": [0.5, 0.4, 0.3, 0.2, 0.1, 0.0]}
"""Dropped: 2 and 4 of beef, 2 and 3 of cafe."""


def pruned_result(unit: WorkUnit, **changed: tuple[float, ...]) -> UnitResult:
    early = EARLY[unit.prompt_id]
    out = {"beef": (2, 4), "cafe": (2, 3)}[unit.prompt_id]
    rewards = tuple(early[i] if i in out else REWARDS[unit.prompt_id][i] for i in unit.indices)
    return replace(replace(result(unit), rewards=rewards, early=tuple(early)), **changed)


def test_a_pruned_pool_is_ranked_by_the_previews_that_were_finished() -> None:
    state = IterationState(PRUNED)
    beef, cafe = PRUNED.pool_units()
    assert (beef.indices, beef.prune) == (tuple(range(6)), Pruning(after=2, keep=4))
    outcome, selection = state.record(pruned_result(beef))
    assert outcome is Outcome.ACCEPTED
    # Of 0.1, 0.6, 0.5 and 0.4: 1 is the best, 0 the worst.
    assert ([c.index for c in selection.top], [c.index for c in selection.bottom]) == ([1], [0])
    assert state.regenerate_unit(selection).prune is None
    assert state.counts().dropped == 2
    state.record(pruned_result(cafe))
    assert (state.counts().candidates, state.counts().dropped) == (12, 4)
    expected = (0.1 + 0.6 + 0.35 + 0.5 + 0.3 + 0.4 + 0.5 + 0.5 + 0.3 + 0.2 + 0.5 + 0.5) / 12
    assert state.proxy_mean == pytest.approx(expected)


def test_an_early_score_is_part_of_an_answers_bytes() -> None:
    state = IterationState(PRUNED)
    beef = PRUNED.pool_units()[0]
    state.record(pruned_result(beef))
    assert state.record(pruned_result(beef))[0] is Outcome.DUPLICATE
    other = (*EARLY["beef"][:5], 0.05)
    assert state.record(pruned_result(beef, early=other))[0] is Outcome.VIOLATION


def test_a_pruned_answer_that_its_early_scores_do_not_bear_out_is_refused() -> None:
    state = IterationState(PRUNED)
    beef = PRUNED.pool_units()[0]
    for wrong in ({"early": (float("nan"), *EARLY["beef"][1:])}, {"rewards": tuple(REWARDS["beef"])}):
        with pytest.raises(ValueError, match="explorer-0 answered explore "):
            state.record(pruned_result(beef, **wrong))
    assert state.wanted("beef") == (beef,)


def test_where_scores_may_differ_the_first_early_ones_count_too_and_say_who_is_dropped() -> None:
    state = IterationState(replace(PRUNED, reproducible=False))
    beef, cafe = PRUNED.pool_units()
    first = pruned_result(beef)
    _, selection = state.record(first)
    other = (0.9, 0.35, 0.5, 0.2, 0.3, 0.1)
    again = tuple(early if i in (1, 4) else 1.0 + i for i, early in enumerate(other))
    assert dropped(replace(first, early=other, rewards=again)) == (1, 4)
    assert state.record(replace(first, early=other, rewards=again)) == (Outcome.DUPLICATE, None)
    state.record(pruned_result(cafe))
    assert (state.counts().duplicates, state.counts().violations, state.counts().dropped) == (1, 0, 4)
    assert state.selections["beef"] == selection
    assert [c.index for c in selection.chosen] == [1, 0]


ONCE = replace(PLAN, reproducible=False)


def rescored(unit: WorkUnit) -> UnitResult:
    """The same unit by a reward that says something else this time."""
    again = result(unit, "explorer-1")
    return replace(again, rewards=tuple(reward + 1 for reward in again.rewards))


def test_where_scores_may_differ_the_first_one_counts_and_another_one_is_no_violation() -> None:
    repeating, once = IterationState(PLAN), IterationState(ONCE)
    for state, expected in ((repeating, Outcome.VIOLATION), (once, Outcome.DUPLICATE)):
        for unit in PLAN.pool_units():
            state.record(result(unit))
            assert state.record(rescored(unit)) == (expected, None)
    assert once.counts().violations == 0
    assert once.counts().duplicates == len(PLAN.pool_units())
    assert once.ordered_selections() == repeating.ordered_selections()


def test_where_scores_may_differ_samples_may_not_and_a_lost_group_is_made_again_to_the_same() -> None:
    state = explored(ONCE)
    first = group(state.selections["beef"])
    assert state.record_group(first) is Outcome.ACCEPTED
    other_scores = replace(first, rewards=tuple(reward / 2 for reward in first.rewards))
    assert state.record_group(other_scores) is Outcome.DUPLICATE
    assert state.record_group(group(state.selections["beef"], shift=1.0)) is Outcome.VIOLATION
    state.lose_group("beef")
    assert state.record_group(other_scores) is Outcome.RESTORED
    assert state.holds(other_scores)


def test_where_scores_may_differ_kept_samples_have_the_scores_that_chose_them() -> None:
    state = explored(replace(ONCE, one_stage=True, keep=2))
    selection = state.selections["beef"]
    made = group(selection)
    again = replace(made, rewards=tuple(reward + 1 for reward in made.rewards))
    assert state.with_first_scores(again).rewards == tuple(REWARDS["beef"][c.index] for c in selection.chosen)


PLANS: list[dict[str, object]] = [
    {"iteration": 5},
    {"revision": 5},
    {"staleness": 1},
    {"prompt_ids": ("beef", "f00d")},
    {"pool": 8},
    {"keep": 2},
    {"unit": 3},
    {"selection": SelectionRule(kind="best")},
    {"one_stage": True},
    {"policy_digest": "bb"},
    {"score_class": "c"},
    {"prune": Pruning(after=1, keep=2)},
    {"reproducible": False},
]


@pytest.mark.parametrize("other", PLANS, ids=lambda other: next(iter(other)))
def test_every_part_of_a_plan_is_in_its_journal(other: dict[str, object]) -> None:
    assert plan_entry(replace(PLAN, **other)) != plan_entry(PLAN)


def test_the_plans_above_differ_in_every_part() -> None:
    assert {next(iter(other)) for other in PLANS} == {field.name for field in fields(IterationPlan)}
