"""Which sample is learned from where: micro-batches, ranks, refusals, noise levels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from solrl_ray.config import objectives as sections
from solrl_ray.errors import RunError
from solrl_ray.learning.batches import check_groups, cut, fingerprint, gather, rank_slots, rewards_and_groups
from solrl_ray.objectives.awm import Awm
from solrl_ray.objectives.base import Objective
from solrl_ray.objectives.nft import DiffusionNft
from solrl_ray.records import Address, SampleGroup
from solrl_ray.sampling.noise import permutation, standard_normal, uniform
from tests.support.learning import LATENT_SHAPE, groups


def samples(batches: list) -> list[tuple[str, int, float]]:
    return [
        (prompt, index, weight)
        for batch in batches
        for prompt, index, weight in zip(batch.prompt_ids, batch.indices, batch.weights.tolist(), strict=True)
    ]


def split(made: list[SampleGroup], micro_batch: int, world_size: int) -> list[list]:
    there = [(group, k) for group in made for k in range(len(group.indices))]
    positions = cut(range(len(there)), micro_batch)
    return [
        [
            gather(there, slots)
            for slots in rank_slots(positions, micro_batch=micro_batch, rank=rank, world_size=world_size)
        ]
        for rank in range(world_size)
    ]


def test_micro_batches_are_consecutive_samples_in_prompt_order_dealt_to_ranks_in_turn() -> None:
    made = groups(0, sizes=(3, 2, 3))
    first, second = split(made, micro_batch=2, world_size=2)
    assert samples(first) == [("p0", 6, 1.0), ("p0", 5, 1.0), ("p1", 3, 1.0), ("p2", 6, 1.0)]
    assert samples(second) == [("p0", 4, 1.0), ("p1", 4, 1.0), ("p2", 5, 1.0), ("p2", 4, 1.0)]
    assert rank_slots(cut(range(10, 13), 2), micro_batch=2, rank=1, world_size=2)[0].samples == (12, 12)
    assert torch.equal(second[0].x0, torch.stack([made[0].latents[2], made[1].latents[0]]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_as_many_passes_of_one_shape_and_each_sample_weighs_once(world_size: int) -> None:
    made = groups(0, sizes=(4, 3, 3))
    ranks = split(made, micro_batch=4, world_size=world_size)
    assert {len(batches) for batches in ranks} == {1 if world_size == 3 else 3 if world_size == 1 else 2}
    assert {batch.x0.shape for batches in ranks for batch in batches} == {(4, *LATENT_SHAPE)}
    found = [sample for batches in ranks for sample in samples(batches)]
    assert sorted(s[:2] for s in found if s[2] == 1.0) == sorted((g.prompt_id, i) for g in made for i in g.indices)
    # What fills the shape repeats the last sample and weighs exactly 0.
    assert {s for s in found if s[2] != 1.0} <= {("p2", 4, 0.0)}


def test_with_several_shapes_no_micro_batch_has_samples_of_two_prompts() -> None:
    sizes = (3, 2, 3)  # the second and third group in parts of an update
    parts = cut(range(3, 8), 2, sizes)
    assert parts == [range(3, 5), range(5, 7), range(7, 8)]
    first, second = (rank_slots(parts, micro_batch=2, rank=rank, world_size=2) for rank in range(2))
    assert [slots.samples for slots in first] == [(3, 4), (7, 7)]
    assert [slots.samples for slots in second] == [(5, 6), (7, 7)]
    assert [slots.weights for slots in second] == [(1.0, 1.0), (0.0, 0.0)]
    assert first[1].weights == (1.0, 0.0)


def test_rewards_come_with_the_position_of_their_prompt() -> None:
    rewards, positions = rewards_and_groups(groups(0, sizes=(2, 1)))
    assert rewards.dtype == np.float64
    assert positions.tolist() == [0, 0, 1]
    assert tuple(rewards) == groups(0, sizes=(2, 1))[0].rewards + groups(0, sizes=(2, 1))[1].rewards


def spoiled(latents: torch.Tensor) -> torch.Tensor:
    latents = latents.clone()
    latents[1, 2, 3] = float("nan")
    return latents


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"revision": 4}, "drawn by revision 4, not by 5"),
        (lambda g: {"iteration": 4}, "made in iteration 4"),
        (lambda g: {"rewards": (0.5, float("nan"), 0.1)}, "rewards that are not finite"),
        (lambda g: {"rewards": (0.5, 0.1)}, "2 rewards"),
        (lambda g: {"indices": (6, 6, 4)}, "not distinct"),
        (lambda g: {"latents": g.latents.bfloat16()}, "torch.bfloat16"),
        (lambda g: {"latents": g.latents[:, :3]}, r"\(3, 3, 16\)"),
        (lambda g: {"latents": spoiled(g.latents)}, "latents that are not finite"),
        (lambda g: {"prompt_id": "p0"}, "come twice"),
    ],
)
def test_samples_that_must_not_be_learned_from_are_refused_by_prompt(change, message: str) -> None:
    made = groups(5)
    made[1] = replace(made[1], **change(made[1]))
    with pytest.raises(RunError, match=f"prompt {made[1].prompt_id} in iteration 5 .*{message}"):
        check_groups(made, iteration=5, revision=5, latent_shapes={None: LATENT_SHAPE})


def test_an_iteration_without_samples_is_refused() -> None:
    with pytest.raises(RunError, match="iteration 5 has no samples"):
        check_groups([], iteration=5, revision=5, latent_shapes={None: LATENT_SHAPE})


def test_the_fingerprint_tells_other_samples_apart() -> None:
    made = groups(0)
    other = [made[0], replace(made[1], rewards=(*made[1].rewards[:2], 0.123)), made[2]]
    assert fingerprint(made) == fingerprint(groups(0))
    own = [replace(made[0], components=tuple((reward, 0.0) for reward in made[0].rewards)), *made[1:]]
    assert len({fingerprint(each) for each in (made, other, own, made[::-1])}) == 4


def test_each_sample_is_noised_by_its_own_addresses() -> None:
    made = groups(2)
    batch = split(made, micro_batch=4, world_size=1)[0][1]  # three samples of p1, then one of p2
    grid = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    objective = DiffusionNft(sections.DiffusionNftConfig(timestep_fraction=0.6), grid=grid, run_seed=7)
    passes = objective.passes(batch, torch.device("cpu"), 2)
    assert len(passes) == 3
    for k, (prompt_id, index) in enumerate(zip(batch.prompt_ids, batch.indices, strict=True)):
        address = {"run_seed": 7, "iteration": 2, "prompt_id": prompt_id, "index": index}
        steps = permutation(Address(purpose="timesteps", **address), 5)[:3]
        for one, step in zip(passes, steps, strict=True):
            eps = standard_normal(Address(purpose="training-noise", step=int(step), **address), LATENT_SHAPE)
            t = grid[step]
            assert one.t[k] == t
            assert torch.equal(one.x_t[k], (1 - t) * batch.x0[k] + t * torch.from_numpy(eps))
    assert len(set(passes[0].t.tolist())) > 1


@pytest.mark.parametrize("kind", ["nft", "awm"])
def test_with_shared_noise_samples_of_a_prompt_get_one_noise_and_one_level_of_each_slice(kind: str) -> None:
    batch = split(groups(2), micro_batch=4, world_size=1)[0][1]  # three samples of p1, then one of p2
    grid = torch.linspace(1, 0, 11)
    shared = {"shared_noise": True, "kl": 0.0}
    objective: Objective[Any, Any] = (
        DiffusionNft(sections.DiffusionNftConfig(**shared), grid=grid, run_seed=7)
        if kind == "nft"
        else Awm(sections.AwmConfig(**shared, timestep_fraction=1.0), grid=grid, run_seed=7)
    )
    passes = objective.passes(batch, torch.device("cpu"), 2)
    slices = [(0, 1), (1, 3), (3, 5), (5, 6), (6, 8), (8, 10)]  # of ten steps
    for k, prompt_id in ((0, "p1"), (3, "p2")):
        address = {"run_seed": 7, "iteration": 2, "prompt_id": prompt_id}
        draws = uniform(Address(purpose="timesteps", **address), (6,))
        steps = [first + int(u * (end - first)) for (first, end), u in zip(slices, draws, strict=True)]
        for one, step in zip(passes, steps, strict=True):
            eps = standard_normal(Address(purpose="training-noise", step=step, **address), LATENT_SHAPE)
            assert one.t[k] == grid[step]
            assert torch.equal(one.x_t[k], (1 - grid[step]) * batch.x0[k] + grid[step] * torch.from_numpy(eps))
    for one in passes:
        assert torch.equal(one.eps[1], one.eps[0])
        assert torch.equal(one.eps[2], one.eps[0])
        assert one.t[:3].tolist() == [one.t[0].item()] * 3
