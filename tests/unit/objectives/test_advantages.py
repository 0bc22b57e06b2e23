"""Advantages, the two decay schedules and the timesteps of training, against worked values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl_ray.config.objectives import Advantage, Anchor, DiffusionNftConfig, OldDecay, share_of
from solrl_ray.config.schema import LearnerConfig
from solrl_ray.objectives.advantages import advantages
from solrl_ray.objectives.nft import DiffusionNft
from solrl_ray.objectives.schedules import ema_decay, follower_decay, learning_rate
from solrl_ray.records import Address
from solrl_ray.sampling import noise

REWARDS = np.array([1.0, 2.0, 3.0, 6.0, 0.0, 0.0, 0.0, 0.0])
GROUPS = np.array([7, 7, 7, 7, 3, 3, 3, 3])


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        # The global standard deviation of REWARDS is 2, that of the first group sqrt(3.5).
        ("global", [-0.9999500025, -0.4999750012, 0, 1.4999250037]),
        ("group", [-1.0689878, -0.5344939, 0, 1.6034817]),
        ("group_unbiased", [-0.9258201, -0.46291005, 0, 1.38873015]),  # by sqrt(14 / 3)
        ("none", [-2, -1, 0, 3]),
    ],
)
def test_advantages_have_their_worked_values(std: str, expected: list[float]) -> None:
    found = advantages(REWARDS, GROUPS, Advantage(std=std))  # type: ignore[arg-type]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found[:4], expected, atol=6e-8, rtol=0)
    assert found[4:].tolist() == [0, 0, 0, 0]


@settings(deadline=None, max_examples=50)
@given(
    samples=st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 4)), min_size=1, max_size=40),
    std=st.sampled_from(["global", "group", "none"]),
    data=st.data(),
)
def test_the_order_of_samples_changes_no_bit(samples: list[tuple[float, int]], std: str, data: st.DataObject) -> None:
    rewards, groups = np.array([r for r, _ in samples]), np.array([g for _, g in samples])
    order = np.array(data.draw(st.permutations(range(len(samples)))))
    found = advantages(rewards, groups, Advantage(std=std))
    shuffled = advantages(rewards[order], groups[order], Advantage(std=std))
    np.testing.assert_array_equal(shuffled, found[order])


def test_advantages_are_not_clipped() -> None:
    rewards = np.array([0.0] * 99 + [100.0])
    found = advantages(rewards, np.zeros(100, dtype=int), Advantage(std="global", clip=5.0))
    assert found.max() == pytest.approx(99 / (np.sqrt(99) + 1e-4))


def test_the_old_policy_follows_more_slowly_as_training_goes_on() -> None:
    found = [follower_decay(OldDecay(), updates) for updates in (1, 10, 100, 200, 500, 1000)]
    assert found == pytest.approx([0.001, 0.01, 0.1, 0.2, 0.5, 0.5], rel=1e-15)
    assert [follower_decay(Anchor(), step) for step in (1, 100, 300, 1000)] == pytest.approx([0.001, 0.1, 0.3, 0.3])
    assert [follower_decay(OldDecay(kind="copy"), updates) for updates in (1, 1000)] == [0.0, 0.0]


def test_the_average_warms_up_to_its_cap() -> None:
    found = [ema_decay(updates, 0.9) for updates in (1, 8, 80, 81, 1000)]
    assert found == pytest.approx([2 / 11, 0.5, 0.9, 0.9, 0.9], rel=1e-15)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"decay": "linear", "steps": 4, "floor": 0.2}, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"warmup": 2, "decay": "linear", "steps": 2}, [0.5, 1, 1, 0.5, 0, 0]),
        # (1 + cos(pi / 3)) / 2 = 3 / 4, then 1 / 4
        ({"decay": "cosine", "steps": 3, "floor": 0.2}, [1, 0.8, 0.4, 0.2, 0.2]),
        # 1 / sqrt(1 + s / 2) for s = 0 … 6, which is a half after three times `steps`
        (
            {"decay": "inverse_sqrt", "steps": 2},
            [1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5, (1 / 3) ** 0.5, (2 / 7) ** 0.5, 0.5],
        ),
        ({"warmup": 1, "decay": "inverse_sqrt", "steps": 1, "floor": 0.2}, [1, 1, 0.2 + 0.8 * 0.5**0.5]),
    ],
)
def test_the_learning_rate_rises_and_falls_by_its_schedule(schedule: dict[str, Any], rates: list[float]) -> None:
    config = LearnerConfig.model_validate({"optimizer": {"lr": 0.01}, "schedule": schedule})
    found = [learning_rate(config, step) for step in range(1, len(rates) + 1)]
    assert found == pytest.approx([0.01 * rate for rate in rates], rel=1e-11)


@pytest.mark.parametrize(
    ("steps", "fraction", "count"),
    [(10, 0.4, 4), (10, 0.6, 6), (10, 0.99, 9), (8, 0.5, 4), (10, 1.0, 10), (10, 0.01, 1), (100, 0.29, 29)],
)
def test_the_number_of_timesteps_is_the_fraction_rounded_down_but_not_to_none(
    steps: int, fraction: float, count: int
) -> None:
    assert share_of(steps, fraction) == count


def sample(index: int) -> Address:
    return Address(run_seed=42, purpose="timesteps", iteration=2, prompt_id="cat", index=index)


def objective(fraction: float = 0.6) -> DiffusionNft:
    return DiffusionNft(DiffusionNftConfig(timestep_fraction=fraction), grid=torch.linspace(1, 0, 11), run_seed=42)


def timesteps_of(index: int, fraction: float = 0.6) -> list[int]:
    return objective(fraction).steps(sample(index)).tolist()


def test_timesteps_are_the_front_of_the_samples_own_permutation() -> None:
    assert timesteps_of(5) == noise.permutation(sample(5), 10)[:6].tolist()
    assert timesteps_of(5, fraction=0.2) == timesteps_of(5)[:2]
    assert sorted(timesteps_of(5, fraction=1.0)) == list(range(10))


COMPONENTS = np.array([[0.0, 10.0], [1.0, 0.0], [2.0, 2.0], [7.0, 5.0], [9.0, 5.0], [11.0, 5.0]])
"""Two rewards of six samples, three a prompt; the second reward of the second prompt is constant."""


def test_each_reward_has_its_own_statistics_before_they_are_summed() -> None:
    # Unbiased deviations: 1 and sqrt(28) in the first prompt, 2 and 0 in the second. Sums, with weights 1 and 2:
    # -1 + 2 · 6/√28, 0 - 2 · 4/√28, 1 - 2 · 2/√28; then -1, 0, 1. Their deviation: √(Σ c² / 5), about their mean 0.
    sums = np.array([-1 + 12 / 28**0.5, -8 / 28**0.5, 1 - 4 / 28**0.5, -1, 0, 1])
    expected = sums / (sums**2).sum() ** 0.5 * 5**0.5
    groups = np.array([0, 0, 0, 1, 1, 1])
    found = advantages(COMPONENTS.sum(axis=1), groups, Advantage(std="gdpo"), components=COMPONENTS, weights=(1.0, 2.0))
    np.testing.assert_allclose(found, expected, atol=4e-4, rtol=0)  # 1e-4 is added to each deviation
    order = np.array([3, 1, 5, 0, 4, 2])
    shuffled = advantages(
        np.zeros(6), groups[order], Advantage(std="gdpo"), components=COMPONENTS[order], weights=(1.0, 2.0)
    )
    np.testing.assert_array_equal(shuffled, found[order])


def test_a_rewards_scale_does_not_matter_with_its_own_statistics() -> None:
    groups, config = np.array([0, 0, 0, 1, 1, 1]), Advantage(std="gdpo")
    one, other = (
        advantages(np.zeros(6), groups, config, components=COMPONENTS * scale + 3, weights=(1.0, 1.0))
        for scale in (np.array([1.0, 1.0]), np.array([1.0, 1000.0]))
    )
    np.testing.assert_allclose(one, other, atol=2e-4)
    assert advantages(REWARDS, GROUPS, config)[4:].tolist() == pytest.approx([0, 0, 0, 0])
