"""From an iteration's sample groups to the fixed micro-batches of each learner rank.

Samples are in prompt order and, inside a prompt, in the order of its selection. Consecutive `micro_batch` of them form
a micro-batch, and micro-batch ``i`` belongs to rank ``i % world_size``. Every rank must make the same number of passes
of the same shape. So the list is filled up to ``world_size`` whole micro-batches with repetitions of the last sample
that weigh exactly 0.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from solrl_ray.errors import RunError
from solrl_ray.objectives.base import MicroBatch
from solrl_ray.records import SampleGroup


def check_groups(
    groups: Sequence[SampleGroup],
    *,
    iteration: int,
    revision: int,
    latent_shape: tuple[int, ...],
    transitions: int = 0,
    checked: int = 0,
) -> None:
    """Refuse samples that must not be learned from.

    Args:
        checked: number of first groups that were checked before.
        transitions: length of each sample's trajectory; 0 if the objective needs none.

    Raises:
        RunError: no groups, a prompt twice, samples of another iteration or revision, wrong shapes or dtypes, values
            that are not finite, missing trajectories; the message names the prompt.
    """
    if not groups:
        raise RunError(f"iteration {iteration} has no samples to learn from")
    seen = {group.prompt_id for group in groups[:checked]}
    for group in groups[checked:]:
        problem = _problem(group, iteration, revision, latent_shape, transitions)
        if problem is None and group.prompt_id in seen:
            problem = "come twice"
        if problem is not None:
            raise RunError(f"the samples of prompt {group.prompt_id} in iteration {iteration} {problem}")
        seen.add(group.prompt_id)


def _problem(
    group: SampleGroup, iteration: int, revision: int, latent_shape: tuple[int, ...], transitions: int
) -> str | None:
    count = len(group.indices)
    if group.iteration != iteration:
        return f"were made in iteration {group.iteration}"
    if group.revision != revision:
        return f"were drawn by revision {group.revision}, not by {revision}, which v_old is"
    if count == 0 or len(set(group.indices)) != count or len(group.rewards) != count:
        return f"are not distinct and rewarded one by one: indices {group.indices}, {len(group.rewards)} rewards"
    if not np.isfinite(np.asarray(group.rewards, dtype=np.float64)).all():
        return f"have rewards that are not finite: {group.rewards}"
    tensors = [("latents", group.latents, (count, *latent_shape))]
    if transitions:
        if group.trajectory is None:
            return "came without the trajectories that the objective learns from"
        tensors.append(("trajectories", group.trajectory.states, (count, transitions + 1, *latent_shape)))
    for name, tensor, shape in tensors:
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            return f"have {name} {tensor.dtype} {tuple(tensor.shape)}, not torch.float32 {shape}"
        if not bool(torch.isfinite(tensor).all()):
            return f"have {name} that are not finite"
    return None


def rewards_and_groups(groups: Sequence[SampleGroup]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rewards in sample order, float64 [n], and each sample's group: its prompt's position, int64 [n]."""
    rewards = [reward for group in groups for reward in group.rewards]
    positions = [i for i, group in enumerate(groups) for _ in group.rewards]
    return np.asarray(rewards, dtype=np.float64), np.asarray(positions, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Slots:
    """The samples of one micro-batch and their weights."""

    samples: tuple[int, ...]
    """Positions in sample order, rising; the last sample is repeated to fill up."""
    weights: tuple[float, ...]
    """1 for a sample, 0 for a repetition."""


def rank_slots(samples: range, *, micro_batch: int, rank: int, world_size: int) -> list[Slots]:
    """The micro-batches of one rank over samples at consecutive positions. Every rank gets the same number."""
    step = micro_batch * world_size
    slots = math.ceil(len(samples) / step) * step
    return [
        Slots(
            tuple(samples[min(i, len(samples) - 1)] for i in range(start, start + micro_batch)),
            tuple(float(i < len(samples)) for i in range(start, start + micro_batch)),
        )
        for start in range(rank * micro_batch, slots, step)
    ]


def gather(samples: Sequence[tuple[SampleGroup, int]], slots: Slots) -> MicroBatch:
    """The micro-batch of `slots`.

    Args:
        samples: (group, position inside the group) in sample order, at least as far as the slots reach.
    """
    chosen = [samples[i] for i in slots.samples]
    paths = [(group.trajectory, k) for group, k in chosen if group.trajectory is not None]
    return MicroBatch(
        prompt_ids=tuple(group.prompt_id for group, _ in chosen),
        indices=tuple(group.indices[k] for group, k in chosen),
        x0=torch.stack([group.latents[k] for group, k in chosen]),
        weights=torch.tensor(slots.weights),
        states=torch.stack([path.states[k] for path, k in paths]) if paths else None,
        first_steps=tuple(path.first_step for path, _ in paths),
    )


def equal_parts(sizes: Sequence[int], count: int) -> list[range]:
    """Splits the groups, in prompt order, into `count` parts as even as possible: positions of their samples.

    Args:
        sizes: samples of each group.
    """
    if not 1 <= count <= len(sizes):
        raise ValueError(f"{len(sizes)} groups cannot be cut into {count} parts")
    cuts = [sum(sizes[: len(sizes) * i // count]) for i in range(count + 1)]
    return [range(first, end) for first, end in pairwise(cuts)]


def fingerprint(groups: Sequence[SampleGroup]) -> int:
    """A 32-bit checksum of prompts, indices and rewards, to compare between ranks."""
    text = ";".join(f"{g.iteration}/{g.revision}/{g.prompt_id}/{g.indices}/{g.rewards}{g.components}" for g in groups)
    return zlib.crc32(text.encode())
