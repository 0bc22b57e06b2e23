"""Makes the group that is learned from out of a pool's chosen samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from solrl_ray.records import SampleGroup, Trajectory, WorkUnit, scores_of


def assemble(unit: WorkUnit, parts: Sequence[SampleGroup]) -> SampleGroup:
    """The samples of `unit`'s indices, in its order, from the `parts` that were sampled unit by unit.

    Raises ValueError: a part is of another prompt, iteration or revision, or an index is in none of them, or only some
    have trajectories.
    """
    where = (unit.iteration, unit.revision, unit.prompt_id)
    places: dict[int, tuple[SampleGroup, int]] = {}
    for part in parts:
        if (part.iteration, part.revision, part.prompt_id) != where:
            came = f"iteration {part.iteration + 1}, revision {part.revision}, prompt {part.prompt_id}"
            raise ValueError(f"samples of {came} came for {unit.describe()} of revision {unit.revision}")
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
    """Trajectories of the chosen rows; all samples of a prompt begin theirs at one step (`rollout.sampler`)."""
    recorded = [(part.trajectory, row) for part, row in chosen if part.trajectory is not None]
    if not recorded:
        return None
    first_steps = {trajectory.first_step for trajectory, _ in recorded}
    if len(recorded) != len(chosen) or len(first_steps) != 1:
        raise ValueError(f"trajectories of {len(recorded)} of {len(chosen)} samples, from steps {sorted(first_steps)}")
    return Trajectory(
        states=torch.stack([trajectory.states[row] for trajectory, row in recorded]), first_step=first_steps.pop()
    )
