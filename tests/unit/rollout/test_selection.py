"""Best and worst K: against a sorted oracle, under ties, in any arrival order."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl_ray.config import selection_rules
from solrl_ray.config.selection_rules import SelectionKind
from solrl_ray.records import Address, Candidate, Scores, Selection
from solrl_ray.rollout.selection import PromptSelection, SelectionRule, selection_digest
from solrl_ray.sampling.noise import permutation


def scores(*rewards: float) -> Scores:
    return Scores(rewards=rewards)


def choose(rewards: list[float], keep: int, order: list[int] | None = None) -> tuple[list[int], list[int]]:
    selection = PromptSelection(len(rewards), keep, prompt_id="cat")
    for index in order if order is not None else range(len(rewards)):
        selection.add([index], scores(rewards[index]))
    best, worst = selection.select()
    return [candidate.index for candidate in best], [candidate.index for candidate in worst]


few_values = st.sampled_from([-1.0, -0.0, 0.0, 0.25, 1.0])
rewards_of_a_pool = st.lists(st.one_of(few_values, st.floats(-4, 4, width=32)), min_size=2, max_size=40)


@settings(deadline=None, max_examples=200)
@given(rewards=rewards_of_a_pool, data=st.data())
def test_any_arrival_order_gives_the_ends_of_the_sorted_pool(rewards: list[float], data: st.DataObject) -> None:
    keep = data.draw(st.integers(2, len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    best, worst = choose(rewards, keep, list(order))
    # The oracle: sort all of it.
    ranked = sorted(range(len(rewards)), key=lambda index: (-rewards[index], index))
    assert best == ranked[: keep // 2]
    assert worst == ranked[::-1][: keep - keep // 2]
    assert len({*best, *worst}) == keep


def test_rewards_are_compared_as_float32() -> None:
    nearly = 1.0 + 2**-30  # rounds to 1 in float32: a tie, which the index decides
    assert choose([1.0, nearly, 0.0], keep=2) == ([0], [2])
    selection = PromptSelection(2, 2, prompt_id="cat")
    selection.add([0], scores(0.1))
    selection.add([1], scores(0.2))
    best, _ = selection.select()
    assert best == (Candidate(prompt_id="cat", index=1, reward=float(np.float32(0.2))),)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf"), 1e39])
def test_a_reward_that_is_not_a_finite_float32_is_refused(reward: float) -> None:
    selection = PromptSelection(4, 2, prompt_id="cat")
    with pytest.raises(ValueError, match="reward of index 3 of prompt cat"):
        selection.add([3], scores(reward))
    selection.add([3], scores(1.0))  # the refused one left no trace


def test_an_index_counts_once_and_belongs_to_the_pool() -> None:
    selection = PromptSelection(4, 2, prompt_id="cat")
    selection.add([1], scores(0.5))
    with pytest.raises(ValueError, match="index 1 of prompt cat was added before"):
        selection.add([1], scores(0.5))
    for index in (-1, 4):
        with pytest.raises(ValueError, match=f"index {index} of prompt cat is outside of its pool of 4"):
            selection.add([index], scores(0.5))


def test_an_incomplete_pool_selects_nothing() -> None:
    selection = PromptSelection(3, 2, prompt_id="cat")
    selection.add([2], scores(0.5))
    selection.add([0], scores(0.5))
    assert not selection.complete
    with pytest.raises(ValueError, match="prompt cat has 2 of 3 rewards"):
        selection.select()
    selection.add([1], scores(0.5))
    assert selection.complete


@pytest.mark.parametrize("keep", [0, 1, 5])
def test_k_must_fit_the_pool(keep: int) -> None:
    with pytest.raises(ValueError, match=f"between 2 and the pool's 4, got {keep}"):
        PromptSelection(4, keep, prompt_id="cat")


@pytest.mark.parametrize("keep", [-1, 0, 1, 5])
def test_a_choice_of_less_than_two_or_more_than_all_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match=f"between 2 and the 4 rewards, got {keep}"):
        selection_rules.choose([0.1, 0.2, 0.3, 0.4], keep)


def candidate(prompt_id: str, index: int, reward: float) -> Candidate:
    return Candidate(prompt_id=prompt_id, index=index, reward=reward)


CAT = Selection(
    iteration=3,
    revision=3,
    prompt_id="cat",
    top=(candidate("cat", 7, 0.5),),
    bottom=(candidate("cat", 2, -0.25),),
)
DOG = replace(CAT, prompt_id="dog")


def test_the_digest_is_that_of_the_documented_bytes() -> None:
    content = b"1:3,3:cat," + bytes.fromhex("01000000 01000000 07000000 0000003f 02000000 000080be")
    assert selection_digest([CAT]) == hashlib.sha256(content).hexdigest()


def test_the_digest_does_not_depend_on_the_order_of_prompts() -> None:
    assert selection_digest([CAT, DOG]) == selection_digest(iter([DOG, CAT]))


@pytest.mark.parametrize(
    "other",
    [
        replace(CAT, iteration=4),
        replace(CAT, prompt_id="car"),
        replace(CAT, top=(candidate("cat", 8, 0.5),)),
        replace(CAT, top=(candidate("cat", 7, float(np.nextafter(np.float32(0.5), np.float32(1)))),)),
        replace(CAT, top=CAT.bottom, bottom=CAT.top),
        replace(CAT, top=CAT.chosen, bottom=()),
    ],
)
def test_the_digest_sees_everything_that_was_chosen(other: Selection) -> None:
    assert selection_digest([other]) != selection_digest([CAT])


def test_a_prompt_selected_twice_in_an_iteration_is_refused() -> None:
    with pytest.raises(ValueError, match="two selections of iteration 3, prompt cat"):
        selection_digest([CAT, DOG, CAT])


def test_who_was_dropped_is_not_chosen_and_completes_the_pool() -> None:
    selection = PromptSelection(6, 2, prompt_id="cat")
    for index, reward in ((1, 0.2), (3, 0.4), (4, 0.1)):
        selection.add([index], scores(reward))
    for index in (0, 5):
        selection.add([index], scores(0.5), dropped=[index])
    assert not selection.complete
    with pytest.raises(ValueError, match="index 5 of prompt cat was added before"):
        selection.add([5], scores(0.5), dropped=[5])
    with pytest.raises(ValueError, match="index 5 of prompt cat was added before"):
        selection.add([5], scores(0.9))
    selection.add([2], scores(0.5), dropped=[2])
    assert selection.dropped == (0, 2, 5)
    best, worst = selection.select()
    assert [(c.index, c.reward) for c in best] == [(3, pytest.approx(0.4))]
    assert [c.index for c in worst] == [4]


def chosen_by(kind: SelectionKind, rewards: list[float], keep: int, **where: Any) -> tuple[list[int], list[int]]:
    rule = SelectionRule(kind=kind, run_seed=where.pop("run_seed", 7))
    selection = PromptSelection(len(rewards), keep, **{"prompt_id": "cat", "rule": rule, "iteration": 3} | where)
    selection.add(range(len(rewards)), scores(*rewards))
    best, worst = selection.select()
    return [candidate.index for candidate in best], [candidate.index for candidate in worst]


def test_the_rule_best_takes_the_best_k_of_which_the_lower_half_counts_as_worst() -> None:
    assert chosen_by("best", [0.1, 0.9, 0.5, 0.7, 0.3, 0.2], keep=4) == ([1, 3], [4, 2])
    assert chosen_by("best", [5.0, 5.0, 5.0, 5.0], keep=2) == ([0], [1])


def test_the_rule_random_is_an_addressed_draw_that_no_reward_changes() -> None:
    rising, pool = [float(index) for index in range(12)], range(12)
    best, worst = chosen_by("random", rising, keep=4)
    assert (best, worst) == (sorted(best, reverse=True), sorted(worst))  # halves by reward, as of the other rules
    assert max(worst) < min(best)
    drawn = {*best, *worst}
    assert {*itertools.chain(*chosen_by("random", [-reward for reward in rising], keep=4))} == drawn
    address = Address(run_seed=7, purpose="selection", iteration=3, prompt_id="cat")
    assert drawn == {*permutation(address, 12)[:4].tolist()}
    elsewhere = ({"iteration": 4}, {"prompt_id": "dog"}, {"run_seed": 8})
    assert all({*itertools.chain(*chosen_by("random", rising, 4, **other))} != drawn for other in elsewhere)
    counts = Counter(i for n in range(600) for i in itertools.chain(*chosen_by("random", rising, 4, iteration=n)))
    assert all(150 < counts[index] < 250 for index in pool)  # 200 each, with a standard deviation of 11.5
