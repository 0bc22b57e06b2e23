"""Pruned units: who goes on, and that a member's score is what it would be alone or in a whole run of the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl_ray import models
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.models.base import DiffusionModel
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Prompt, PromptEmbedding, Pruning, UnitResult, WorkUnit
from solrl_ray.rewards.base import Reward
from solrl_ray.rewards.mixture import RewardMixture, Weighted
from solrl_ray.rollout.sampler import Previewed, Sampler
from solrl_ray.rollout.selection import dropped, survivors
from tests import oracle

CONFIGS = Path(__file__).parents[3] / "configs"
PROMPT = Prompt(id="p", text="a red ring")
UNIT = WorkUnit(
    stage="explore", iteration=2, revision=2, prompt_id="p", indices=tuple(range(12)), prune=Pruning(after=3, keep=6)
)


class Redness(Reward):
    calls = taken = 0

    def take_costs(self) -> dict[str, int]:
        new, self.taken = self.calls - self.taken, self.calls
        return {"requests": new}

    def compute(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        self.calls += 1
        return images[:, 0].mean(dim=(1, 2)) - images[:, 2].mean(dim=(1, 2))


def test_the_tails_go_on_and_of_equal_scores_the_earlier_is_the_better() -> None:
    assert survivors([0.1, 0.9, 0.5, 0.7, 0.3, 0.2], 4) == (0, 1, 3, 5)
    assert survivors([0.5] * 6, 2) == (0, 5)
    with pytest.raises(ValueError, match="keep must lie between 2 and the 3 rewards, got 4"):
        survivors([0.1, 0.2, 0.3], 4)


@settings(deadline=None, max_examples=100)
@given(scores=st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=30), data=st.data())
def test_nobody_who_is_dropped_is_better_than_the_best_or_worse_than_the_worst(
    scores: list[float], data: st.DataObject
) -> None:
    keep = 2 * data.draw(st.integers(1, len(scores) // 2))
    kept = survivors(scores, keep)
    assert len(kept) == keep
    assert list(kept) == sorted(set(kept))
    ranked = sorted(scores, reverse=True)
    for position in set(range(len(scores))) - set(kept):
        assert ranked[keep // 2 - 1] >= scores[position] >= ranked[-keep // 2]


def answer(early: tuple[float, ...], rewards: tuple[float, ...], prune: Pruning | None) -> UnitResult:
    unit = replace(UNIT, indices=tuple(range(10, 10 + len(rewards))), prune=prune)
    return UnitResult(unit=unit, rewards=rewards, early=early, worker="e", score_class="c", seconds=1.0)


def test_who_was_dropped_is_read_off_an_answer_that_must_bear_it_out() -> None:
    early, prune = (0.4, 0.9, 0.5, 0.1), Pruning(after=2, keep=2)
    assert dropped(answer(early, (0.4, 0.8, 0.5, 0.2), prune)) == (10, 12)
    assert dropped(answer((), (0.4, 0.8, 0.5, 0.2), None)) == ()
    with pytest.raises(ValueError, match="with rewards of dropped members that differ from their early scores"):
        dropped(answer(early, (0.4, 0.8, 0.6, 0.2), prune))
    with pytest.raises(ValueError, match="with 0 early scores"):
        dropped(answer((), (0.4, 0.8, 0.5, 0.2), prune))
    with pytest.raises(ValueError, match="with 4 early scores"):
        dropped(answer(early, (0.4, 0.8, 0.5, 0.2), None))


def configured(solver: str = "dpm2", sampler: str = "{kind: ode}", unit: int = 12) -> Config:
    rollout = f"{{prompts: 2, pool: 12, keep: 4, solver: {solver}, sampler: {sampler}}}"
    return load(
        [CONFIGS / "demo.yaml"],
        [
            f"rollout={rollout}",
            "rollout.explore={steps: 6, micro_batch: 4, precision: nvfp4-emulated}",
            "rollout.regenerate={steps: 8, micro_batch: 4}",
            f"rollout.preview={{unit: {unit}, prune: {{after: 3, keep: 6}}}}",
        ],
    )


@cache
def model_in(tier: str) -> tuple[DiffusionModel, PromptEmbedding]:
    config = configured()
    model = models.load(config.model, "cpu", components={"text", "transformer", "vae"})
    embedding = PromptEmbedding(prompt_id="p", tensors=model.encode([PROMPT.text])[0], digest="p")
    if tier != "float32":
        quantize_(model.transformer, tier, config.model.quantization)
    return model, embedding


class Bench:
    def __init__(self, config: Config, tier: str) -> None:
        self.reward = Redness("redness")
        self.model, self.embedding = model_in(tier)
        self.sampler = Sampler(config, self.model, self.reward, steps=6, micro_batch=4)

    def preview(self, unit: WorkUnit) -> Previewed:
        return self.sampler.preview(unit, PROMPT, self.embedding)


@pytest.mark.parametrize(
    ("tier", "solver", "size"),
    [
        ("float32", "euler", 12),
        ("float32", "dpm2", 4),
        ("nvfp4-emulated", "dpm2", 12),
        ("nvfp4-emulated", "euler", 4),
    ],
)
def test_pruned_units_have_the_bytes_of_the_oracle(tier: str, solver: str, size: int) -> None:
    """`size` 4: three units of one micro-batch, of which two go on and are padded."""
    config = configured(solver, unit=size)
    bench = Bench(config, tier)
    prune, found = Pruning(after=3, keep=size // 2), {}
    for first in range(0, 12, size):
        unit = replace(UNIT, indices=tuple(range(first, first + size)), prune=prune)
        previewed = bench.preview(unit)
        kept = survivors(previewed.early, prune.keep)
        found |= {unit.indices[position]: previewed.rewards[position] for position in kept}
    seeds = [oracle.address(config, "initial-noise", 2, ("p", index)) for index in range(12)]
    assert found == oracle.explore(config, bench.model, bench.reward.score, PROMPT.text, bench.embedding, seeds)


STOCHASTIC = (
    "{kind: flow_sde}",
    "{kind: flow_sde, window: {size: 2, range: [1, 6]}}",
    "{kind: dance_sde, shared_noise: true}",
)


@pytest.mark.parametrize("sampler", ["{kind: ode}", *STOCHASTIC])
def test_whoever_goes_on_ends_where_an_unpruned_preview_ends(sampler: str) -> None:
    """Solvers keep their history and noise its addresses, in whatever micro-batch a member goes on."""
    bench = Bench(configured(sampler=sampler), "float32")
    whole, pruned = bench.preview(replace(UNIT, prune=None)), bench.preview(UNIT)
    kept = survivors(pruned.early, 6)
    assert kept != tuple(range(6))
    finished = [pruned.rewards[position] for position in kept]
    assert finished == pytest.approx([whole.rewards[position] for position in kept], rel=1e-4, abs=1e-5)
    out = [position for position in range(12) if position not in kept]
    assert [pruned.rewards[position] for position in out] == [pruned.early[position] for position in out]
    assert all(abs(pruned.rewards[position] - pruned.early[position]) > 1e-5 for position in kept)
    assert len(set(whole.rewards)) == 12


def test_a_pruned_unit_is_scored_twice_in_micro_batches_of_one_shape_and_its_last_one_is_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(configured(), "float32")
    shapes = []
    velocity = bench.model.velocity

    def counted(latents: torch.Tensor, sigma: float, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        shapes.append(len(latents))
        return velocity(latents, sigma, batch)

    monkeypatch.setattr(bench.model, "velocity", counted)
    with pytest.raises(ValueError, match="is pruned; only previews can be"):
        bench.sampler(UNIT, PROMPT, bench.embedding)
    bench.preview(UNIT)
    # Three micro-batches take three steps each; then six members, as two micro-batches of four, take the other three.
    assert shapes == [4] * (3 * 3 + 2 * 3)
    assert bench.reward.calls == 3 + 2


def test_what_a_preview_costs_is_that_of_both_scorings() -> None:
    bench = Bench(configured(), "float32")
    assert bench.preview(UNIT).reward_costs == {"requests": 3 + 2}
    assert bench.preview(replace(UNIT, prune=None)).reward_costs == {"requests": 3}


class BrightAndRed(RewardMixture):
    """Two rewards of very different scales."""

    def __init__(self) -> None:
        super().__init__([Weighted(Redness("redness"), 1.0), Weighted(Brightness("brightness"), 1.0)])


class Brightness(Reward):
    def compute(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return 1000 * images.mean(dim=(1, 2, 3))


def test_a_unit_of_several_rewards_is_pruned_by_their_normalized_sum_inside_the_unit() -> None:
    rewards = "rewards=[{kind: 'a.py:redness'}, {kind: 'a.py:brightness'}]"
    config = load([CONFIGS / "demo.yaml"], [rewards, "objective.advantage.std=gdpo"])
    model, embedding = model_in("float32")
    previewed = [
        Sampler(one, model, BrightAndRed(), steps=6, micro_batch=4).preview(UNIT, PROMPT, embedding)
        for one in (config, load([CONFIGS / "demo.yaml"], [rewards]))
    ]
    own, plain = previewed
    assert [len(each) for each in own.components] == [2] * 12
    assert plain.components == ()
    assert own.rewards == pytest.approx([sum(each) for each in own.components])
    dropped_rows = [row for row in range(12) if row not in survivors(own.early, 6)]
    early = torch.tensor(
        [own.components[row] for row in dropped_rows]
    ).double()  # their components are those of their early scores
    assert survivors(own.early, 6) != survivors(plain.early, 6)
    found = torch.tensor([own.early[row] for row in dropped_rows]).double()
    # Normalized sums are linear in both rewards: three of the dropped seeds fix the plane, the others lie on it.
    plane = torch.linalg.lstsq(torch.cat([early, torch.ones(6, 1)], dim=1), found[:, None]).solution
    torch.testing.assert_close(
        torch.cat([early, torch.ones(6, 1)], dim=1) @ plane, found[:, None], atol=1e-3, rtol=1e-3
    )
    assert abs(plane[0] / plane[1]) > 50
