"""Which members of a pruned unit `sampler.py` continues: the tails by the unit's own early scores.

::

    all members ──after steps──► x0 estimates, scored ──► best and worst go on ──to the end──► ranked
                                                      └─► the middle is dropped

Explorers decide by it, and the selector finds the pruned members in their answers by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from solrl_ray.records import UnitResult
from solrl_ray.rollout.selection import extremes


def survivors(early: Sequence[float], keep: int) -> tuple[int, ...]:
    """Positions of the `keep` members that continue, rising: half of them with the highest early scores, half with the
    lowest; of equal scores the earlier member is better.

    Raises:
        ValueError: fewer than `keep` scores, or `keep` is below 2.
    """
    best, worst = extremes(early, keep)
    return tuple(sorted(best + worst))


def dropped(result: UnitResult) -> tuple[int, ...]:
    """Candidate indices of the pruned members, rising; none if the unit is not pruned.

    Raises:
        ValueError: early scores that the unit does not ask for, or lacks; or a pruned member with another reward than
            its early score.
    """
    unit, early = result.unit, result.early
    if len(early) != (len(unit.indices) if unit.prune else 0):
        raise ValueError(f"{result.worker} answered {unit.describe()} with {len(early)} early scores")
    if unit.prune is None:
        return ()
    kept = set(survivors(early, unit.prune.keep))
    out = [position for position in range(len(early)) if position not in kept]
    if not result.components and any(result.rewards[position] != early[position] for position in out):
        raise ValueError(
            f"{result.worker} answered {unit.describe()} with other rewards than early scores of those dropped"
        )
    return tuple(unit.indices[position] for position in out)
