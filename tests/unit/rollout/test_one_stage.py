"""The state, ledger and selector of strategies that learn from the pool's own samples."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.workers.selector import Ack, Selector
from solrl_ray.records import SampleGroup, Trajectory, UnitResult, WorkUnit
from solrl_ray.rollout.groups import assemble
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationState, group_digest
from solrl_ray.scheduling.ledger import Outcome

PLAN = IterationPlan(iteration=4, revision=4, prompt_ids=("beef", "cafe"), pool=6, keep=2, unit=2, one_stage=True)
REWARDS = {"beef": [0.1, 0.6, 0.3, 0.5, 0.2, 0.4], "cafe": [0.5, 0.25, 0.75, 1.0, 0.0, 0.3]}
"""Best and worst: 1 and 0 of beef, both in its first unit; 3 and 4 of cafe, in its second and third."""


def sampled(unit: WorkUnit, shift: float = 0.0) -> SampleGroup:
    return SampleGroup(
        iteration=unit.iteration,
        revision=unit.revision,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        rewards=tuple(REWARDS[unit.prompt_id][i] for i in unit.indices),
        latents=torch.tensor([[10.0 * i + shift, float(i)] for i in unit.indices]),
        seconds=0.5,
        worker=f"explorer-{unit.indices[0] // 2}",
    )


def result(unit: WorkUnit, shift: float = 0.0) -> UnitResult:
    group = sampled(unit, shift)
    return UnitResult(
        unit=unit,
        rewards=group.rewards,
        worker=group.worker,
        score_class="c",
        seconds=0.5,
        samples_digest=group_digest(group),
    )


def explored(plan: IterationPlan = PLAN) -> IterationState:
    state = IterationState(plan)
    for unit in plan.pool_units():
        state.record(result(unit))
    return state


def chosen(state: IterationState, prompt_id: str) -> WorkUnit:
    """The unit whose group is put together of samples."""
    return state.regenerate_unit(state.selections[prompt_id])


def test_a_group_is_made_of_the_chosen_samples_in_the_order_of_the_selection() -> None:
    state = explored()
    unit = chosen(state, "cafe")
    assert (unit.stage, unit.indices) == ("regenerate", (3, 4))
    group = assemble(unit, [sampled(source) for source in PLAN.pool_units_of("cafe")[1:]])
    assert group.rewards == (1.0, 0.0)
    assert group.latents.tolist() == [[30.0, 3.0], [40.0, 4.0]]
    assert (group.worker, group.seconds) == ("explorer-1, explorer-2", 1.0)
    assert state.record_group(group) is Outcome.ACCEPTED


@pytest.mark.parametrize("seed", range(5))
def test_order_and_duplicates_change_no_byte_of_a_group(seed: int) -> None:
    chance = random.Random(seed)
    arrivals = PLAN.pool_units() * 2
    chance.shuffle(arrivals)
    state, calm = IterationState(PLAN), explored()
    for unit in arrivals:
        state.record(result(unit))
    for prompt_id in PLAN.prompt_ids:
        parts = [sampled(source) for source in PLAN.pool_units_of(prompt_id)]
        expected = assemble(chosen(calm, prompt_id), parts)
        chance.shuffle(parts)
        assert group_digest(assemble(chosen(state, prompt_id), parts)) == group_digest(expected)
    assert state.ledger.duplicates == 6


def test_samples_that_come_out_otherwise_the_second_time_are_a_violation() -> None:
    state = explored()
    assert state.record(result(PLAN.pool_units()[0])) == (Outcome.DUPLICATE, None)
    assert state.record(result(PLAN.pool_units()[0], shift=1.0)) == (Outcome.VIOLATION, None)


def test_samples_of_another_unit_make_no_group() -> None:
    unit = chosen(explored(), "cafe")
    first, second, third = (sampled(source) for source in PLAN.pool_units_of("cafe"))
    with pytest.raises(ValueError, match=r"samples \[4\] of prompt cafe are in none of the 2 parts"):
        assemble(unit, [first, second])
    for stranger in (replace(third, revision=3), sampled(PLAN.pool_units()[2])):
        with pytest.raises(
            ValueError, match=r"^regenerate \(iteration 5, prompt cafe, seeds 3 to 4\) .* got samples of"
        ):
            assemble(unit, [second, stranger])


def test_trajectories_go_with_their_samples_and_come_from_all_or_none() -> None:
    unit = chosen(explored(), "cafe")

    def recorded(source: WorkUnit, first_step: int = 2) -> SampleGroup:
        states = torch.tensor([[[100.0 * i], [100.0 * i + 1]] for i in source.indices])
        return replace(sampled(source), trajectory=Trajectory(states=states, first_step=first_step))

    _, second, third = PLAN.pool_units_of("cafe")
    group = assemble(unit, [recorded(second), recorded(third)])
    assert group.trajectory is not None
    assert group.trajectory.first_step == 2
    assert group.trajectory.states.tolist() == [[[300.0], [301.0]], [[400.0], [401.0]]]
    assert assemble(unit, [sampled(second), sampled(third)]).trajectory is None
    for parts in ([recorded(second), sampled(third)], [recorded(second), recorded(third, first_step=1)]):
        with pytest.raises(ValueError, match="of 2 samples have trajectories, which begin at steps"):
            assemble(unit, parts)


def explore(selector: Selector, units: Sequence[WorkUnit]) -> dict[str, SampleGroup]:
    """Sample units and put every group together that can be; returns what was sampled."""
    made = {}
    for unit in units:
        made[unit.id] = sampled(unit)
        (ack,) = selector.accept([result(unit)])
        if (wanted := ack.chosen) is not None:
            rewards, group = selector.assemble(wanted, *[s for s in made.values() if s.prompt_id == wanted.prompt_id])
            assert group.rewards == rewards
    return made


def test_a_resumed_iteration_wants_the_group_of_what_was_chosen_but_not_yet_stored(tmp_path: Path) -> None:
    first = Selector(tmp_path)
    units = first.open(PLAN).units
    assert len(explore(first, units[:3])) == 3
    first._of(4).settle(wait=True)  # beef's group is stored
    first.accept([result(unit) for unit in units[3:5]])  # known, but their samples go down with the process

    again = Selector(tmp_path)
    opened = again.open(PLAN)
    assert [group.prompt_id for group in opened.groups] == ["beef"]
    assert opened.groups[0].latents.tolist() == [[10.0, 1.0], [0.0, 0.0]]
    (last,) = opened.units
    assert last.id == "sample/4/cafe/4-5"
    (ack,) = again.accept([result(last)])
    wanted = ack.chosen
    assert wanted is not None
    assert wanted.indices == (3, 4)
    assert Selector(tmp_path).open(PLAN).units == (wanted,)
    lost = units[4]
    (ack,) = again.accept([result(lost)])  # made again
    assert ack == Ack(chosen=wanted)
    assert again.assemble(wanted, sampled(lost), sampled(last))[0] == (1.0, 0.0)
    assert [s.prompt_id for s in again.close(4).selections] == ["beef", "cafe"]
    entries = [json.loads(line.split(b" ", 1)[1]) for line in (tmp_path / "journal/iteration-000004.jsonl").open("rb")]
    assert [e["kind"] for e in entries].count("sample") == 6


def test_a_damaged_group_is_put_together_from_samples_that_are_made_again(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    explore(selector, selector.open(PLAN).units)
    before = selector.close(4)
    next(tmp_path.rglob("beef.safetensors")).write_bytes(b"")
    assert selector.stored(4, "beef") == ((), None)
    (unit,) = selector.wanted(4)
    assert unit.id == "regenerate/4/beef/1-0"
    selector.assemble(unit, sampled(PLAN.pool_units()[0]))
    assert selector.close(4) == before
    _, again = selector.stored(4, "beef")
    assert again is not None
    assert again.latents.tolist() == [[10.0, 1.0], [0.0, 0.0]]


ONCE = replace(PLAN, reproducible=False)


def rescored(unit: WorkUnit) -> tuple[UnitResult, SampleGroup]:
    """The same samples by a reward that says something else this time, as an explorer answers then."""
    group = replace(sampled(unit), rewards=tuple(r + 1 for r in sampled(unit).rewards))
    return replace(result(unit), rewards=group.rewards, samples_digest=group_digest(group, scores=False)), group


def first(unit: WorkUnit) -> UnitResult:
    return replace(result(unit), samples_digest=group_digest(sampled(unit), scores=False))


def test_chosen_samples_that_are_made_again_keep_their_first_scores_where_scores_may_differ(tmp_path: Path) -> None:
    begun = Selector(tmp_path)
    begun.accept([first(unit) for unit in begun.open(ONCE).units])
    again = Selector(tmp_path)
    (unit,) = [unit for unit in again.open(ONCE).units if unit.prompt_id == "cafe"]
    made = [rescored(each) for each in ONCE.pool_units_of("cafe")[1:]]
    assert not any(ack.differs for ack in again.accept([answer for answer, _ in made]))
    rewards, group = again.assemble(unit, *[samples for _, samples in made])
    assert rewards == group.rewards == (1.0, 0.0)
    assert again._of(4).state.counts().violations == 0


def test_a_group_of_scores_that_may_differ_is_read_again_by_its_samples(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    for unit in selector.open(ONCE).units:
        (ack,) = selector.accept([first(unit)])
        if (wanted := ack.chosen) is not None:
            selector.assemble(wanted, *[sampled(each) for each in ONCE.pool_units_of(wanted.prompt_id)])
    selector.close(4)
    opened = Selector(tmp_path).open(ONCE)
    assert [group.prompt_id for group in opened.groups] == ["beef", "cafe"]
    assert opened.units == ()
