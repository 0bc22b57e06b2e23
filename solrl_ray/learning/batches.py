"""Splits an iteration's sample groups into the fixed micro-batches of each learner rank.

Samples are in prompt order and, within a prompt, in the order of its selection. Each `micro_batch` consecutive samples
form a micro-batch; micro-batch ``i`` belongs to rank ``i % world_size``. All samples of a forward have one shape. So in
a run with several shapes no micro-batch has samples of two prompts, and the number of micro-batches does not depend on
the shapes of the prompts.

A short micro-batch is filled up with repetitions of its last sample, whose weight is exactly 0. Every rank must make
the same number of passes, so the list is filled up with micro-batches of such repetitions.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from solrl_ray.errors import RunError
from solrl_ray.objectives.base import MicroBatch
from solrl_ray.records import SampleGroup, SampleShape


def check_groups(
    groups: Sequence[SampleGroup],
    *,
    iteration: int,
    revision: int,
    latent_shapes: Mapping[SampleShape | None, tuple[int, ...]],
    transitions: int = 0,
    checked: int = 0,
) -> None:
    """Check that the learner may train on these samples.

    Args:
        latent_shapes: shape of a sample → shape of its latent.
        checked: the first `checked` groups were checked before.
        transitions: length of each sample's trajectory; 0 if the objective needs none.

    Raises RunError if there are no groups or a prompt occurs twice. Also if samples belong to another iteration or
    revision, have wrong shapes or dtypes, values that are not finite, or no trajectories. The message names the prompt.
    """
    if not groups:
        raise RunError(f"iteration {iteration} has no samples to learn from")
    seen = {group.prompt_id for group in groups[:checked]}
    for group in groups[checked:]:
        problem = _problem(group, iteration, revision, latent_shapes, transitions)
        if problem is None and group.prompt_id in seen:
            problem = "come twice"
        if problem is not None:
            raise RunError(f"the samples of prompt {group.prompt_id} in iteration {iteration} {problem}")
        seen.add(group.prompt_id)


def _problem(
    group: SampleGroup,
    iteration: int,
    revision: int,
    latent_shapes: Mapping[SampleShape | None, tuple[int, ...]],
    transitions: int,
) -> str | None:
    count = len(group.indices)
    if group.iteration != iteration:
        return f"were made in iteration {group.iteration}"
    if group.revision != revision:
        return f"were drawn by revision {group.revision}, not by {revision}, the revision of `old`"
    if count == 0 or len(set(group.indices)) != count or len(group.rewards) != count:
        return f"are not distinct and rewarded one by one: indices {group.indices}, {len(group.rewards)} rewards"
    if not np.isfinite(np.asarray(group.rewards, dtype=np.float64)).all():
        return f"have rewards that are not finite: {group.rewards}"
    return _problem_of_tensors(group, latent_shapes, transitions)


def _problem_of_tensors(
    group: SampleGroup, latent_shapes: Mapping[SampleShape | None, tuple[int, ...]], transitions: int
) -> str | None:
    if group.shape not in latent_shapes:
        return f"have the shape {group.shape}, which is not in model.resolution"
    count, latent_shape = len(group.indices), latent_shapes[group.shape]
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
    """Rewards in sample order, float64 [n], and each sample's group (the position of its prompt), int64 [n]."""
    rewards = [reward for group in groups for reward in group.rewards]
    positions = [i for i, group in enumerate(groups) for _ in group.rewards]
    return np.asarray(rewards, dtype=np.float64), np.asarray(positions, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Slots:
    """The samples of one micro-batch and their weights."""

    samples: tuple[int, ...]
    """Positions in sample order, ascending; the last sample is repeated to fill up."""
    weights: tuple[float, ...]
    """1 for a sample, 0 for a repetition."""


def cut(samples: range, micro_batch: int, sizes: Sequence[int] = ()) -> list[range]:
    """Cut consecutive positions into parts of `micro_batch`; the last part may be shorter.

    `sizes`: sizes of the iteration's groups, if no part may have samples of two groups.
    """
    inner = [end for end in accumulate(sizes) if samples.start < end < samples.stop]
    bounds = pairwise([samples.start, *inner, samples.stop])
    return [
        range(start, min(start + micro_batch, end)) for first, end in bounds for start in range(first, end, micro_batch)
    ]


def rank_slots(parts: Sequence[range], *, micro_batch: int, rank: int, world_size: int) -> list[Slots]:
    """The micro-batches of one rank, out of `parts`, those of all ranks. Every rank gets the same number.

    A short micro-batch is filled up with its last sample, an empty one with the last sample of all.
    """
    end, slots = parts[-1].stop, []
    for part in [*parts, *[range(end, end)] * (-len(parts) % world_size)][rank::world_size]:
        missing, repeated = micro_batch - len(part), part[-1] if part else end - 1
        slots.append(Slots((*part, *[repeated] * missing), (*[1.0] * len(part), *[0.0] * missing)))
    return slots


def gather(samples: Sequence[tuple[SampleGroup, int]], slots: Slots) -> MicroBatch:
    """The micro-batch of `slots`.

    `samples`: (group, position in the group) in sample order, at least up to the last sample of `slots`.
    """
    chosen = [samples[i] for i in slots.samples]
    paths = [(group.trajectory, k) for group, k in chosen if group.trajectory is not None]
    return MicroBatch(
        prompt_ids=tuple(group.prompt_id for group, _ in chosen),
        indices=tuple(group.indices[k] for group, k in chosen),
        x0=torch.stack([group.latents[k] for group, k in chosen]),
        weights=torch.tensor(slots.weights),
        shape=chosen[0][0].shape,
        states=torch.stack([path.states[k] for path, k in paths]) if paths else None,
        first_steps=tuple(path.first_step for path, _ in paths),
    )


def equal_parts(sizes: Sequence[int], count: int) -> list[range]:
    """Split the groups, in prompt order, into `count` parts of nearly equal size; returns positions of their samples.

    `sizes`: number of samples of each group.
    """
    cuts = [sum(sizes[: len(sizes) * i // count]) for i in range(count + 1)]
    return [range(first, end) for first, end in pairwise(cuts)]


def fingerprint(groups: Sequence[SampleGroup]) -> int:
    """A 32-bit checksum of prompts, indices and rewards, to compare ranks."""
    text = ";".join(f"{g.iteration}/{g.revision}/{g.prompt_id}/{g.indices}/{g.rewards}{g.components}" for g in groups)
    return zlib.crc32(text.encode())
