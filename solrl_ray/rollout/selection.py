"""The chosen seeds of a prompt's pool, by the run's rule (`config.selection_rules`) and their proxy rewards.

Neither arrival order nor the fleet can change them (design law 3).

Which members of a pruned unit go on is decided likewise, by the unit's own early scores::

    all members ──after steps──► x0 estimates, scored ──► best and worst go on ──to the end──► ranked
                                                      └─► the middle is dropped

Explorers decide by it (`survivors`), and the selector finds the pruned members in their answers by it (`dropped`).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from solrl_ray.config.selection_rules import SelectionKind, choose
from solrl_ray.objectives.gdpo import Normalizer
from solrl_ray.records import Address, Candidate, Scores, Selection, UnitResult, scores_of
from solrl_ray.sampling.noise import permutation


def survivors(early: Sequence[float], keep: int) -> tuple[int, ...]:
    """Positions of the `keep` members that continue, rising: half of them with the highest early scores, half with the
    lowest; of equal scores the earlier member is better.

    Raises:
        ValueError: fewer than `keep` scores, or `keep` is below 2.
    """
    top, bottom = choose(early, keep)
    return tuple(sorted(top + bottom))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRule:
    """How seeds of a complete pool are chosen, as part of an iteration's plan."""

    kind: SelectionKind = "best_worst"
    run_seed: int = 0
    """Of the draw ``random``."""
    reward_weights: tuple[float, ...] = ()
    """Of rewards with their own statistics, whose normalized sum ranks a pool (`objectives.gdpo`); empty: their sum
    does.
    """


BEST_AND_WORST = SelectionRule()


class PromptSelection:
    """The chosen K seeds of a prompt's pool: ``add()`` until the pool is complete, then ``select()``."""

    def __init__(
        self, pool: int, keep: int, *, prompt_id: str, rule: SelectionRule = BEST_AND_WORST, iteration: int = 0
    ) -> None:
        """
        Args:
            pool: N, seeds of the prompt; their indices are 0 … N-1.
            keep: K, how many are chosen; if odd, one more of the bottom than of the top.
            prompt_id: of the candidates that `select` returns.
            iteration: part of the address of a draw.

        Raises:
            ValueError: K is below 2 or above N.
        """
        if not 2 <= keep <= pool:
            raise ValueError(f"keep must lie between 2 and the pool's {pool}, got {keep}")
        self.pool = pool
        self.prompt_id = prompt_id
        self._keep = keep
        self._rule, self._iteration = rule, iteration
        self._normalizer: Normalizer | None = None
        self._rows: dict[int, tuple[Scores, int]] = {}
        """Seed → the row of a record that has its scores."""
        self._dropped: set[int] = set()

    def add(self, indices: Sequence[int], scores: Scores, dropped: Collection[int] = ()) -> None:
        """Take the scores of some seeds.

        Args:
            scores: a row for each of the `indices`. Rewards are rounded to float32.
            dropped: those of the seeds whose previews were pruned, so that they cannot be chosen.

        Raises:
            ValueError: a reward is not finite, an index is outside the pool, or it was added before.
        """
        for row, index in enumerate(indices):
            if not 0 <= index < self.pool:
                raise ValueError(f"index {index} of prompt {self.prompt_id} is outside of its pool of {self.pool}")
            if index in self._rows:
                raise ValueError(f"index {index} of prompt {self.prompt_id} was added before")
            if not math.isfinite(_float32(scores.rewards[row])):  # too large a value becomes infinite
                raise ValueError(f"reward of index {index} of prompt {self.prompt_id} is {scores.rewards[row]}")
            self._rows[index] = scores, row
        self._dropped.update(dropped)

    def scores(self, indices: Iterable[int]) -> Scores:
        """Those of seeds that were added."""
        return scores_of([self._rows[index] for index in indices])

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of all seeds known so far, in the order of their indices; of a dropped one its early score."""
        return tuple(map(_float32, self.scores(sorted(self._rows)).rewards))

    def ranking(self, scores: Scores) -> tuple[float, ...]:
        """What ranks samples of this prompt, given their scores, as float32 values: rewards, or normalized sums by the
        statistics of the pool's seeds that were not dropped. The pool must be complete.
        """
        if not self._rule.reward_weights:
            return scores.rewards
        if self._normalizer is None:
            own = self.scores(sorted(self._rows.keys() - self._dropped)).components
            self._normalizer = Normalizer.of(own, self._rule.reward_weights)
        return tuple(map(_float32, self._normalizer(scores.components)))

    @property
    def dropped(self) -> tuple[int, ...]:
        """Seeds that were dropped, rising."""
        return tuple(sorted(self._dropped))

    @property
    def complete(self) -> bool:
        """Whether every seed of the pool was added."""
        return len(self._rows) == self.pool

    def select(self) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
        """Top in falling and bottom in rising order of what ranks the pool.

        Raises:
            ValueError: the pool is not complete, or fewer than K of its seeds were not dropped.
        """
        if not self.complete:
            raise ValueError(f"prompt {self.prompt_id} has {len(self._rows)} of {self.pool} rewards")
        rule, prompt_id = self._rule, self.prompt_id
        address = Address(run_seed=rule.run_seed, purpose="selection", iteration=self._iteration, prompt_id=prompt_id)
        indices = sorted(self._rows.keys() - self._dropped)
        ranking = tuple(map(_float32, self.ranking(self.scores(indices))))
        top, bottom = (
            tuple(Candidate(prompt_id=prompt_id, index=indices[i], reward=ranking[i]) for i in half)
            for half in choose(ranking, self._keep, rule.kind, lambda count: permutation(address, count).tolist())
        )
        return top, bottom


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def selection_digest(selections: Iterable[Selection]) -> str:
    """SHA-256, hex, over what was chosen: independent of the order of `selections`.

    Hashed, by iteration and prompt id: both as netstrings, the sizes of top and bottom (uint32), then index (uint32)
    and float32 reward of each chosen candidate, all little-endian.

    Raises:
        ValueError: two selections are of the same iteration and prompt.
    """
    digest, ordered = hashlib.sha256(), sorted(selections, key=lambda each: (each.iteration, each.prompt_id))
    for one, other in pairwise(ordered):
        if (one.iteration, one.prompt_id) == (other.iteration, other.prompt_id):
            raise ValueError(f"two selections of iteration {one.iteration}, prompt {one.prompt_id}")
    for selection in ordered:
        for text in (str(selection.iteration).encode(), selection.prompt_id.encode()):
            digest.update(b"%d:%s," % (len(text), text))
        digest.update(struct.pack("<II", len(selection.top), len(selection.bottom)))
        for candidate in selection.chosen:
            digest.update(struct.pack("<If", candidate.index, candidate.reward))
    return digest.hexdigest()
