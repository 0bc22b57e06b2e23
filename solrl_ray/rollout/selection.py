"""The chosen seeds of a prompt's pool: its best and worst by their proxy rewards, or by another rule.

One total order decides: higher reward first, of equal rewards the smaller index first. `best` is the front of that
order and `worst` its back, so the K chosen indices are distinct whatever the ties. Neither arrival order nor the fleet
can change them (design law 3).

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from solrl_ray.config.schema import SelectionKind
from solrl_ray.objectives.gdpo import Contrast
from solrl_ray.records import Address, Candidate, Selection, UnitResult
from solrl_ray.sampling.noise import permutation


def extremes(rewards: Sequence[float], keep: int) -> tuple[list[int], list[int]]:
    """Positions of the best floor(K / 2), in falling order, and of the worst ceil(K / 2), in rising order.

    Raises:
        ValueError: K is below 2 or above the number of rewards.
    """
    if not 2 <= keep <= len(rewards):
        raise ValueError(f"keep must lie between 2 and the {len(rewards)} rewards, got {keep}")
    order = sorted(range(len(rewards)), key=lambda position: (-rewards[position], position))
    return order[: keep // 2], order[::-1][: keep - keep // 2]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRule:
    """Which seeds of a complete pool may be chosen. ``best`` and ``random`` leave K of them."""

    kind: SelectionKind = "best_worst"
    run_seed: int = 0
    """Of the draw ``random``."""
    weights: tuple[float, ...] = ()
    """Of rewards with their own statistics, whose contrast ranks a pool (`objectives.gdpo`); empty: their sum does."""

    def eligible(self, rewards: Sequence[float], keep: int, *, iteration: int, prompt_id: str) -> list[int]:
        """Positions, rising."""
        if self.kind == "best":
            return sorted(sorted(range(len(rewards)), key=lambda position: (-rewards[position], position))[:keep])
        if self.kind == "random":
            address = Address(run_seed=self.run_seed, purpose="selection", iteration=iteration, prompt_id=prompt_id)
            return sorted(permutation(address, len(rewards))[:keep].tolist())
        return list(range(len(rewards)))


BEST_AND_WORST = SelectionRule()


class PromptSelection:
    """The best floor(K / 2) and worst ceil(K / 2) of a prompt's pool: ``add()`` or ``drop()`` × pool, ``select()``.

    By another rule than `BEST_AND_WORST` these are the halves of that rule's K seeds.
    """

    def __init__(
        self, pool: int, keep: int, *, prompt_id: str, rule: SelectionRule = BEST_AND_WORST, iteration: int = 0
    ) -> None:
        """
        Args:
            pool: N, seeds of the prompt; their indices are 0 … N-1.
            keep: K, how many are chosen; if odd, one more worst than best.
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
        self._contrast: Contrast | None = None
        self._rewards: dict[int, float] = {}
        self._dropped: dict[int, float] = {}
        self._components: dict[int, tuple[float, ...]] = {}

    def add(self, index: int, reward: float, components: tuple[float, ...] = ()) -> None:
        """Take the proxy reward of one seed, rounded to float32.

        Args:
            components: each reward's own value, if the rule has weights.

        Raises:
            ValueError: the reward is not finite, the index is outside the pool, or it was added before.
        """
        self._rewards[index] = self._checked(index, reward)
        self._components[index] = components

    def drop(self, index: int, early: float, components: tuple[float, ...] = ()) -> None:
        """As `add`, for a seed whose preview was pruned after this early score, so that it cannot be chosen."""
        self._dropped[index] = self._checked(index, early)
        self._components[index] = components

    def given(self, index: int) -> tuple[float, tuple[float, ...]]:
        """Reward and components of a seed that was added."""
        return self._rewards[index], self._components[index]

    def contrasts(self, components: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        """What ranks seeds of this prompt, given their components: float32 values, by the statistics of the pool's
        seeds that were not dropped. The pool must be complete.
        """
        if self._contrast is None:
            own = [self._components[index] for index in sorted(self._rewards)]
            self._contrast = Contrast.of(own, self._rule.weights)
        return tuple(_float32(value) for value in self._contrast(components))

    @property
    def scores(self) -> list[float]:
        """Of all seeds known so far, in the order of their indices; of a dropped one the early score."""
        known = self._rewards | self._dropped
        return [known[index] for index in sorted(known)]

    @property
    def ranking(self) -> tuple[float, ...]:
        """What ranks the seeds, in the order of their indices: `scores`, or the contrasts of a complete pool."""
        if not self._rule.weights:
            return tuple(self.scores)
        return self.contrasts([self._components[index] for index in sorted(self._components)])

    @property
    def dropped(self) -> tuple[int, ...]:
        """Seeds that were dropped, rising."""
        return tuple(sorted(self._dropped))

    @property
    def complete(self) -> bool:
        """Whether every seed of the pool was added or dropped."""
        return len(self._rewards) + len(self._dropped) == self.pool

    def select(self) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
        """Best in falling and worst in rising order.

        Raises:
            ValueError: the pool is not complete, or fewer than K of its seeds have rewards.
        """
        if not self.complete:
            raise ValueError(f"prompt {self.prompt_id} has {len(self._rewards)} of {self.pool} rewards")
        indices, keep = sorted(self._rewards), self._keep
        ranked = dict(zip(sorted(self._components), self.ranking, strict=True))
        rewards = [ranked[index] for index in indices]
        left = self._rule.eligible(rewards, keep, iteration=self._iteration, prompt_id=self.prompt_id)
        indices = [indices[position] for position in left]
        best, worst = extremes([rewards[position] for position in left], keep)
        sides = [
            tuple(Candidate(prompt_id=self.prompt_id, index=indices[i], reward=ranked[indices[i]]) for i in side)
            for side in (best, worst)
        ]
        return sides[0], sides[1]

    def _checked(self, index: int, reward: float) -> float:
        if not 0 <= index < self.pool:
            raise ValueError(f"index {index} of prompt {self.prompt_id} is outside of its pool of {self.pool}")
        if index in self._rewards or index in self._dropped:
            raise ValueError(f"index {index} of prompt {self.prompt_id} was added before")
        value = _float32(reward)  # too large a value becomes infinite
        if not math.isfinite(value):
            raise ValueError(f"reward of index {index} of prompt {self.prompt_id} is {reward}")
        return value


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def selection_digest(selections: Iterable[Selection]) -> str:
    """SHA-256, hex, over what was chosen: independent of the order of `selections`.

    Hashed, by iteration and prompt id: both as netstrings, the numbers of best and of worst (uint32), then index
    (uint32) and float32 reward of each chosen candidate, all little-endian.

    Raises:
        ValueError: two selections are of the same iteration and prompt.
    """
    named: dict[tuple[int, str], Selection] = {}
    for selection in selections:
        name = (selection.iteration, selection.prompt_id)
        if name in named:
            raise ValueError(f"two selections of iteration {name[0]}, prompt {name[1]}")
        named[name] = selection
    digest = hashlib.sha256()
    for _, selection in sorted(named.items()):
        for text in (str(selection.iteration).encode(), selection.prompt_id.encode()):
            digest.update(b"%d:%s," % (len(text), text))
        digest.update(struct.pack("<II", len(selection.best), len(selection.worst)))
        for candidate in selection.chosen:
            digest.update(struct.pack("<If", candidate.index, candidate.reward))
    return digest.hexdigest()
