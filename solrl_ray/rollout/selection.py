"""Chooses seeds of a prompt's pool by their proxy rewards and the run's rule (`config.selection_rules`).

Neither arrival order nor the fleet can change the choice (design law 3).

Pruning works the same way. The early scores of a unit decide which of its members continue::

    all members ──after steps──► x0 estimates, scored ──► best and worst continue ──to the end──► ranked
                                                      └─► the middle is dropped

Explorers prune with `survivors`. The selector recomputes the pruned members from their answers with `dropped`.
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
    """Positions of the `keep` members that continue, ascending.

    Half of them have the highest early scores, half the lowest. At equal scores the earlier member ranks higher.

    Raises:
        ValueError: fewer than `keep` scores, or `keep` is below 2.
    """
    top, bottom = choose(early, keep)
    return tuple(sorted(top + bottom))


def dropped(result: UnitResult) -> tuple[int, ...]:
    """Candidate indices of the pruned members, ascending; none if the unit is not pruned.

    Raises:
        ValueError: the number of early scores is wrong, or the reward of a pruned member is not its early score.
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
            f"{result.worker} answered {unit.describe()} with rewards of dropped members that differ from their early "
            "scores"
        )
    return tuple(unit.indices[position] for position in out)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRule:
    """The rule that chooses seeds of a complete pool, as part of an iteration's plan."""

    kind: SelectionKind = "best_worst"
    run_seed: int = 0
    """Seed of the draw, for the kind ``random``."""
    reward_weights: tuple[float, ...] = ()
    """Weights, if each reward has its own statistics: the sum of normalised rewards ranks a pool (`objectives.gdpo`).
    Empty: the plain weighted sum ranks it.
    """


BEST_AND_WORST = SelectionRule()


class PromptSelection:
    """The chosen K seeds of a prompt's pool: ``add()`` until the pool is complete, then ``select()``."""

    def __init__(
        self, pool: int, keep: int, *, prompt_id: str, rule: SelectionRule = BEST_AND_WORST, iteration: int = 0
    ) -> None:
        """
        Args:
            pool: N, the number of seeds of the prompt; their indices are 0 … N-1.
            keep: K, the number of chosen seeds; if odd, the bottom gets one more than the top.
            prompt_id: prompt of the candidates that `select` returns.
            iteration: part of the address of the random draw.

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
        """Seed → the record with its scores, and the row in it."""
        self._dropped: set[int] = set()

    def add(self, indices: Sequence[int], scores: Scores, dropped: Collection[int] = ()) -> None:
        """Add the scores of some seeds.

        Args:
            scores: one row per index of `indices`. Rewards are rounded to float32.
            dropped: seeds whose previews were pruned; they cannot be chosen.

        Raises:
            ValueError: a reward is not finite, an index is outside the pool, or it was added before.
        """
        for row, index in enumerate(indices):
            if not 0 <= index < self.pool:
                raise ValueError(f"index {index} of prompt {self.prompt_id} is outside of its pool of {self.pool}")
            if index in self._rows:
                raise ValueError(f"index {index} of prompt {self.prompt_id} was added before")
            if not math.isfinite(_float32(scores.rewards[row])):  # a value above float32's range becomes infinite
                raise ValueError(f"reward of index {index} of prompt {self.prompt_id} is {scores.rewards[row]}")
            self._rows[index] = scores, row
        self._dropped.update(dropped)

    def scores(self, indices: Iterable[int]) -> Scores:
        """The scores of seeds that were added, in the order of `indices`."""
        return scores_of([self._rows[index] for index in indices])

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of all seeds added so far, in the order of their indices. For a dropped seed, its early score."""
        return tuple(map(_float32, self.scores(sorted(self._rows)).rewards))

    def ranking(self, scores: Scores) -> tuple[float, ...]:
        """The float32 values that rank samples of this prompt.

        These are the rewards, or with `reward_weights` the sums of normalised rewards. Their statistics are those of
        the pool's seeds that were not dropped. The pool must be complete.
        """
        if not self._rule.reward_weights:
            return scores.rewards
        if self._normalizer is None:
            own = self.scores(sorted(self._rows.keys() - self._dropped)).components
            self._normalizer = Normalizer.of(own, self._rule.reward_weights)
        return tuple(map(_float32, self._normalizer(scores.components)))

    @property
    def dropped(self) -> tuple[int, ...]:
        """The dropped seeds, ascending."""
        return tuple(sorted(self._dropped))

    @property
    def complete(self) -> bool:
        """Whether every seed of the pool was added."""
        return len(self._rows) == self.pool

    def select(self) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
        """The top seeds from the best downwards, and the bottom seeds from the worst upwards, by `ranking`.

        Raises:
            ValueError: the pool is not complete, or fewer than K of its seeds remain after pruning.
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
    """SHA-256, in hex, of the chosen candidates; independent of the order of `selections`.

    Selections are hashed in the order of iteration and prompt id. Bytes of each, little-endian: iteration and prompt
    id as netstrings; the sizes of top and bottom (uint32); index (uint32) and reward (float32) of each candidate.

    Raises:
        ValueError: two selections are of the same iteration and prompt.
    """
    digest, ordered = hashlib.sha256(), sorted(selections, key=lambda s: (s.iteration, s.prompt_id))
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
