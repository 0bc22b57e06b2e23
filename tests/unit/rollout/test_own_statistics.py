"""Seeds chosen by several rewards with their own statistics, and what of them is written down and compared."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from solrl_ray.records import Pruning, SampleGroup, Scores, UnitResult, WorkUnit
from solrl_ray.rollout.groups import assemble
from solrl_ray.rollout.selection import PromptSelection, SelectionRule
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationState, group_digest
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.storage.journal_entries import unit_entry, unit_result

WEIGHTS = (1.0, 2.0)
RULE = SelectionRule(reward_weights=WEIGHTS)
OWN = {
    "beef": [(0.0, 400.0), (0.5, 100.0), (0.25, 900.0), (0.75, 200.0), (1.0, 300.0), (0.125, 500.0)],
    "cafe": [(0.5, 1.0), (0.5, 3.0), (0.5, 2.0), (0.5, 6.0), (0.5, 4.0), (0.5, 5.0)],
}
"""Two rewards of each seed; the second one would decide every plain sum."""
PLAN = IterationPlan(iteration=4, revision=4, prompt_ids=("beef", "cafe"), pool=6, keep=4, unit=2, selection=RULE)


def worked(rows: Sequence[tuple[float, ...]], of: Sequence[tuple[float, ...]] | None = None) -> list[float]:
    """The formula, by NumPy: statistics of `of`, or of the rows themselves."""
    known = np.array(rows if of is None else of)
    mean, std = known.mean(axis=0), known.std(axis=0, ddof=1)
    found: list[float] = ((np.array(rows) - mean) / (std + 1e-4) @ np.array(WEIGHTS)).tolist()
    return found


def scores(*own: tuple[float, ...]) -> Scores:
    return Scores(rewards=tuple(map(sum, own)), components=own)


def order_of(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def result(unit: WorkUnit, worker: str = "explorer-0") -> UnitResult:
    own = tuple(OWN[unit.prompt_id][i] for i in unit.indices)
    sums = tuple(map(sum, own))
    return UnitResult(unit=unit, rewards=sums, components=own, worker=worker, score_class="c", seconds=0.1)


def group(indices: tuple[int, ...], prompt_id: str = "beef") -> SampleGroup:
    own = tuple(OWN[prompt_id][i] for i in indices)
    return SampleGroup(
        iteration=4,
        revision=4,
        prompt_id=prompt_id,
        indices=indices,
        rewards=tuple(map(sum, own)),
        components=own,
        latents=torch.tensor([[float(i)] for i in indices]),
    )


def test_a_pool_is_ranked_by_the_sum_of_standardised_rewards_in_any_order_of_arrival() -> None:
    expected, own = worked(OWN["beef"]), OWN["beef"]
    order = order_of(expected)
    assert order != order_of([sum(each) for each in own])
    for seed in range(3):
        pool, arrivals = PromptSelection(6, 4, prompt_id="beef", rule=RULE), list(range(6))
        random.Random(seed).shuffle(arrivals)
        for index in arrivals:
            pool.add([index], scores(own[index]))
        chosen = [*itertools.chain(*pool.select())]
        assert [candidate.index for candidate in chosen] == [*order[:2], *order[:-3:-1]]
        rewards = [candidate.reward for candidate in chosen]
        assert rewards == pytest.approx([expected[i] for i in (*order[:2], *order[:-3:-1])], rel=1e-6)


def test_dropped_seeds_have_no_part_in_the_statistics() -> None:
    pool, own = PromptSelection(6, 2, prompt_id="beef", rule=RULE), OWN["beef"]
    pool.add(range(6), scores(*own), dropped=(2, 5))
    kept = [own[i] for i in (0, 1, 3, 4)]
    assert list(pool.ranking(scores(*own))) == pytest.approx(worked(own, of=kept), rel=1e-6)
    chosen = {candidate.index for side in pool.select() for candidate in side}
    assert chosen == {(0, 1, 3, 4)[order_of(worked(kept))[place]] for place in (0, -1)}


def test_samples_are_compared_by_the_statistics_of_their_pool() -> None:
    state = IterationState(PLAN)
    for unit in state.plan.pool_units():
        state.record(result(unit))
    for prompt_id in PLAN.prompt_ids:
        state.record_group(group(state.regenerate_unit(state.selections[prompt_id]).indices, prompt_id))
    summary = state.close()
    for prompt_id, selection, seen in zip(PLAN.prompt_ids, summary.selections, summary.rewards, strict=True):
        of_all = dict(enumerate(worked(OWN[prompt_id])))
        assert list(seen) == pytest.approx([of_all[c.index] for c in selection.chosen], rel=1e-6, abs=1e-6)
    assert summary.proxy_mean == pytest.approx(np.mean([sum(each) for pool in OWN.values() for each in pool]))


def test_a_journal_gives_each_rewards_values_back() -> None:
    unit = replace(PLAN.pool_units()[0], prune=Pruning(after=1, keep=2))
    given = replace(result(unit), early=tuple(map(float, worked(OWN["beef"][:2]))))
    entry = json.loads(json.dumps(unit_entry(given)))
    found = unit_result(entry, replace(PLAN, prune=unit.prune))
    assert (found.rewards, found.components) == (given.rewards, given.components)
    assert "components" not in unit_entry(replace(given, components=()))


@pytest.mark.parametrize("components", [(), ((0.1,), (0.2,)), ((0.1, 0.2),), ((0.1, 0.2), (0.3, float("nan")))])
def test_an_answer_without_every_rewards_values_is_refused(components: tuple[tuple[float, ...], ...]) -> None:
    unit = PLAN.pool_units()[0]
    state = IterationState(PLAN)
    with pytest.raises(ValueError, match=r"^explorer-7 answered explore .* of 2 samples, each with 2 rewards$"):
        state.record(replace(result(unit, "explorer-7"), components=components))
    plain = IterationState(replace(PLAN, selection=SelectionRule()))
    with pytest.raises(ValueError, match=r" of 2 samples$"):
        plain.record(result(unit))


def test_a_repeated_answer_is_compared_by_every_rewards_values() -> None:
    state, unit = IterationState(PLAN), PLAN.pool_units()[0]
    first = result(unit)
    other = replace(first, components=(first.components[0], (0.5, 101.0)))
    assert state.record(first)[0] is Outcome.ACCEPTED
    assert state.record(first)[0] is Outcome.DUPLICATE
    assert state.record(other)[0] is Outcome.VIOLATION
    assert group_digest(group((0, 1))) != group_digest(replace(group((0, 1)), components=((0.0, 1.0), (0.5, 2.0))))


def test_a_group_of_kept_samples_has_the_values_that_chose_them() -> None:
    """Where scores are not reproducible, samples that were made again may have others."""
    state = IterationState(replace(PLAN, one_stage=True, reproducible=False))
    for unit in state.plan.pool_units():
        state.record(replace(result(unit), samples_digest="s"))
    chosen = state.regenerate_unit(state.selections["beef"])
    parts = [group(unit.indices) for unit in state.plan.pool_units_of("beef")]
    again = [replace(part, components=tuple((a + 1, b) for a, b in part.components)) for part in parts]
    found = state.with_first_scores(assemble(chosen, again))
    assert found.components == tuple(OWN["beef"][i] for i in chosen.indices)
    assert found.rewards == tuple(sum(each) for each in found.components)
