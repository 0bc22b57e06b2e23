"""Builds a training group from the chosen samples of a prompt's pool. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from solrl_ray.records import SampleGroup, Trajectory, WorkUnit, scores_of


def assemble(unit: WorkUnit, parts: Sequence[SampleGroup]) -> SampleGroup:
    """Collect the samples of `unit`'s indices, in its order, from `parts`, the samples of the pool's units.

    Raises ValueError if a part belongs to another prompt, iteration or revision, if an index is in no part, or if only
    some samples have trajectories.
    """
    where = (unit.iteration, unit.revision, unit.prompt_id)
    places: dict[int, tuple[SampleGroup, int]] = {}
    for part in parts:
        if (part.iteration, part.revision, part.prompt_id) != where:
            actual = f"iteration {part.iteration + 1}, revision {part.revision}, prompt {part.prompt_id}"
            raise ValueError(f"{unit.describe()} of revision {unit.revision} got samples of {actual}")
        places |= {index: (part, row) for row, index in enumerate(part.indices)}
    missing = [index for index in unit.indices if index not in places]
    if missing:
        raise ValueError(f"samples {missing} of prompt {unit.prompt_id} are in none of the {len(parts)} parts")
    chosen = [places[index] for index in unit.indices]
    return SampleGroup(
        iteration=unit.iteration,
        revision=unit.revision,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        **scores_of(chosen).columns,
        latents=torch.stack([part.latents[row] for part, row in chosen]),
        shape=parts[0].shape,
        trajectory=_trajectory(chosen),
        seconds=sum(part.seconds for part in parts),
        worker=", ".join(sorted({part.worker for part in parts})),
    )


def _trajectory(chosen: Sequence[tuple[SampleGroup, int]]) -> Trajectory | None:
    """Trajectories of the chosen rows. Those of one prompt all begin at the same step (`rollout.sampler`)."""
    recorded = [(part.trajectory, row) for part, row in chosen if part.trajectory is not None]
    if not recorded:
        return None
    first_steps = {trajectory.first_step for trajectory, _ in recorded}
    if len(recorded) != len(chosen) or len(first_steps) != 1:
        raise ValueError(
            f"{len(recorded)} of {len(chosen)} samples have trajectories, which begin at steps {sorted(first_steps)}; "
            "all must have one, from the same step"
        )
    return Trajectory(
        states=torch.stack([trajectory.states[row] for trajectory, row in recorded]), first_step=first_steps.pop()
    )
