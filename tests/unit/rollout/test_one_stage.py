"""The state, ledger and selector of strategies that learn from the pool's own samples."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.workers.selector import Selector
from solrl_ray.errors import RunError
from solrl_ray.records import SampleGroup, Trajectory, UnitResult, WorkUnit
from solrl_ray.scheduling.groups import assemble
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationState, group_digest
from solrl_ray.scheduling.ledger import Ledger, Outcome

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


def ids(state: IterationState) -> list[str]:
    """Every unit that is wanted, in order."""
    return [unit.id for unit in state.all_wanted()]


def explored(plan: IterationPlan = PLAN) -> IterationState:
    state = IterationState(plan)
    for unit in plan.pool_units():
        state.record(result(unit))
    return state


def test_a_group_is_made_of_the_chosen_samples_in_the_order_of_the_selection() -> None:
    state = explored()
    unit = state.regeneration("cafe")
    assert unit is not None
    assert (unit.stage, unit.indices) == ("regenerate", (3, 4))
    assert [source.id for source in state.sources("cafe")] == ["sample/4/cafe/2-3", "sample/4/cafe/4-5"]
    group = assemble(unit, [sampled(source) for source in state.sources("cafe")])
    assert group.rewards == (1.0, 0.0)
    assert group.latents.tolist() == [[30.0, 3.0], [40.0, 4.0]]
    assert group.worker == "explorer-1, explorer-2"
    assert state.record_group(group) is Outcome.ACCEPTED


def test_no_group_is_handed_to_a_regenerator() -> None:
    state = explored()
    assert state.all_wanted() == ()
    assert not state.complete
    for prompt_id in PLAN.prompt_ids:
        unit = state.regeneration(prompt_id)
        assert unit is not None
        state.record_group(assemble(unit, [sampled(source) for source in state.sources(prompt_id)]))
    assert [s.prompt_id for s in state.close().selections] == ["beef", "cafe"]


@pytest.mark.parametrize("seed", range(5))
def test_order_losses_and_duplicates_change_no_byte_of_a_group(seed: int) -> None:
    chance = random.Random(seed)
    arrivals = PLAN.pool_units() * 2
    chance.shuffle(arrivals)
    state = IterationState(PLAN)
    for unit in arrivals:
        state.record(result(unit))
    state.lose(chance.choice(PLAN.prompt_ids))
    for unit_id in ids(state):
        unit = next(unit for unit in PLAN.pool_units() if unit.id == unit_id)
        assert state.record(result(unit)) == (Outcome.RESTORED, None)
    for prompt_id in PLAN.prompt_ids:
        unit, calm = state.regeneration(prompt_id), explored()
        assert unit is not None
        parts = [sampled(source) for source in state.sources(prompt_id)]
        chance.shuffle(parts)
        group = assemble(unit, parts)
        expected = assemble(calm.regeneration(prompt_id), [sampled(u) for u in PLAN.pool_units_of(prompt_id)])  # type: ignore[arg-type]
        assert group_digest(group) == group_digest(expected)
    assert state.explore.duplicates == 6


def test_lost_samples_are_made_again_and_only_those_that_were_chosen() -> None:
    state = explored()
    state.lose("beef")
    assert state.regeneration("beef") is None
    assert state.regeneration("cafe") is not None
    assert ids(state) == ["sample/4/beef/0-1"]
    first = PLAN.pool_units()[0]
    assert state.record(result(first)) == (Outcome.RESTORED, None)
    assert state.regeneration("beef") is not None
    assert ids(state) == []
    assert state.counts().candidates == 12
    assert state.counts().duplicates == 0


def test_samples_that_come_out_otherwise_the_second_time_are_a_violation() -> None:
    state = explored()
    state.lose("beef")
    assert state.record(result(PLAN.pool_units()[0], shift=1.0)) == (Outcome.VIOLATION, None)
    assert state.regeneration("beef") is None


def test_a_unit_whose_samples_are_lost_is_wanted_until_it_has_come_again() -> None:
    unit = PLAN.pool_units()[0]
    ledger = Ledger([unit])
    assert ledger.finish(unit.id, "digest") is Outcome.ACCEPTED
    assert ledger.wanted() == []
    ledger.redo(unit.id)
    ledger.redo(unit.id)
    assert ledger.wanted() == [unit]
    assert ledger.complete  # its result is there
    assert ledger.finish(unit.id, "digest") is Outcome.RESTORED
    assert ledger.finish(unit.id, "digest") is Outcome.DUPLICATE
    assert (ledger.wanted(), ledger.duplicates) == ([], 1)


def test_samples_of_another_unit_make_no_group() -> None:
    unit = explored().regeneration("cafe")
    assert unit is not None
    first, second, third = (sampled(source) for source in PLAN.pool_units_of("cafe"))
    with pytest.raises(ValueError, match=r"samples \[4\] of prompt cafe are in none of the 2 parts"):
        assemble(unit, [first, second])
    for stranger in (replace(third, revision=3), sampled(PLAN.pool_units()[2])):
        with pytest.raises(ValueError, match=r"came for regenerate \(iteration 5, prompt cafe, seeds 3 to 4\)"):
            assemble(unit, [second, stranger])


def test_trajectories_go_with_their_samples_and_come_from_all_or_none() -> None:
    unit = explored().regeneration("cafe")
    assert unit is not None

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
        with pytest.raises(ValueError, match="of 2 samples, from steps"):
            assemble(unit, parts)


def explore(selector: Selector, units: Sequence[WorkUnit]) -> dict[str, SampleGroup]:
    """Sample units and put every group together that can be; returns what was sampled."""
    made = {}
    for unit in units:
        made[unit.id] = sampled(unit)
        (ack,) = selector.accept([result(unit)])
        if ack.assemble is not None:
            prompt = [part for part in made.values() if part.prompt_id == ack.assemble.prompt_id]
            rewards, group = selector.assemble(ack.assemble, *prompt)
            assert group.rewards == rewards
    return made


def wanted(selector: Selector) -> list[str]:
    return [unit.id for unit in selector.wanted(4)]


def test_a_resumed_iteration_samples_again_what_was_chosen_but_not_yet_stored(tmp_path: Path) -> None:
    first = Selector(tmp_path)
    units = first.open(PLAN).units
    assert len(explore(first, units[:3])) == 3
    first._of(4).settle(wait=True)  # beef's group is stored
    first.accept([result(unit) for unit in units[3:5]])  # known, but their samples go down with the process

    again = Selector(tmp_path)
    opened = again.open(PLAN)
    assert [group.prompt_id for group in opened.groups] == ["beef"]
    assert opened.groups[0].latents.tolist() == [[10.0, 1.0], [0.0, 0.0]]
    assert opened.candidates == 10
    (last,) = opened.units
    assert last.id == "sample/4/cafe/4-5"
    (ack,) = again.accept([result(last)])
    (lost,) = ack.units  # selected, but one chosen sample is lost
    assert (lost.id, ack.assemble) == ("sample/4/cafe/2-3", None)
    assert wanted(again) == [lost.id]
    (ack,) = again.accept([result(lost)])
    assert ack.units == ()
    assert ack.assemble is not None
    assert ack.assemble.indices == (3, 4)
    assert again.assemble(ack.assemble, sampled(lost), sampled(last))[0] == (1.0, 0.0)
    assert [s.prompt_id for s in again.close(4).selections] == ["beef", "cafe"]
    entries = [json.loads(line.split(b" ", 1)[1]) for line in (tmp_path / "journal/iteration-000004.jsonl").open("rb")]
    assert [e["kind"] for e in entries].count("sample") == 6


def test_a_resumed_iteration_asks_at_once_for_the_chosen_samples_of_a_selected_prompt(tmp_path: Path) -> None:
    first = Selector(tmp_path)
    first.accept([result(unit) for unit in first.open(PLAN).units])
    again = Selector(tmp_path)
    opened = again.open(PLAN)
    assert opened.candidates == 12
    waiting = [unit.id for unit in opened.units]
    assert sorted(waiting) == ["sample/4/beef/0-1", "sample/4/cafe/2-3", "sample/4/cafe/4-5"]
    with pytest.raises(
        RunError,
        match=r"brought other bytes for sample \(.*prompt beef, .*\) than explorer-0, whose samples are lost",
    ):
        again.accept([result(PLAN.pool_units()[0], shift=1.0)])


def test_samples_that_are_lost_before_their_group_is_put_together_are_wanted_again(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    units = selector.open(PLAN).units
    unit = selector.accept([result(unit) for unit in units])[5].assemble
    assert unit is not None
    assert selector.wanted(4) == ()
    assert [each.id for each in selector.lose(unit)] == ["sample/4/cafe/2-3", "sample/4/cafe/4-5"]
    explore(selector, selector.wanted(4))
    assert selector.wanted(4) == ()
    assert selector.stored(4, "cafe")[0] == ()


def test_a_damaged_group_is_put_together_from_samples_that_are_made_again(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    explore(selector, selector.open(PLAN).units)
    before = selector.close(4)
    next(tmp_path.rglob("beef.safetensors")).write_bytes(b"")
    units, group = selector.stored(4, "beef")
    assert ([unit.id for unit in units], group) == (["sample/4/beef/0-1"], None)
    explore(selector, units)
    assert selector.close(4) == before
    (nothing, again) = selector.stored(4, "beef")
    assert nothing == ()
    assert again is not None
    assert again.latents.tolist() == [[10.0, 1.0], [0.0, 0.0]]


def test_a_journal_of_the_other_kind_of_strategy_is_refused(tmp_path: Path) -> None:
    Selector(tmp_path).open(PLAN)
    with pytest.raises(RunError, match="was begun with another plan"):
        Selector(tmp_path).open(replace(PLAN, one_stage=False))


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
    lost = [unit for unit in again.open(ONCE).units if unit.prompt_id == "cafe"]
    made = {unit.id: rescored(unit) for unit in lost}
    unit = again.accept([answer for answer, _ in made.values()])[-1].assemble
    assert unit is not None
    rewards, group = again.assemble(unit, *[samples for _, samples in made.values()])
    assert rewards == group.rewards == (1.0, 0.0)
    assert again._of(4).state.counts().violations == 0


def test_a_group_of_scores_that_may_differ_is_read_again_by_its_samples(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    for unit in selector.open(ONCE).units:
        (ack,) = selector.accept([first(unit)])
        if ack.assemble is not None:
            parts = [sampled(each) for each in ONCE.pool_units_of(ack.assemble.prompt_id)]
            selector.assemble(ack.assemble, *parts)
    selector.close(4)
    opened = Selector(tmp_path).open(ONCE)
    assert [group.prompt_id for group in opened.groups] == ["beef", "cafe"]
    assert opened.units == ()


def recorded(group: SampleGroup, first_step: int) -> SampleGroup:
    """With trajectories of two steps from `first_step` on."""
    states = torch.arange(len(group.indices) * 6, dtype=torch.float32).reshape(len(group.indices), 3, 2)
    return replace(group, trajectory=Trajectory(states=states, first_step=first_step))


def test_the_step_at_which_trajectories_begin_is_part_of_a_groups_bytes() -> None:
    group = sampled(PLAN.pool_units()[0])
    digests = {group_digest(each) for each in (group, recorded(group, 0), recorded(group, 1), recorded(group, 2))}
    assert len(digests) == 4
