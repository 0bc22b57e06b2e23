"""Best and worst seeds of a prompt's pool, kept while the proxy rewards stream in.

One total order decides everything: higher reward first, of equal rewards the smaller index first. `best` is
the front of that order and `worst` its back, so the K chosen indices are distinct whatever the ties, and
neither arrival order nor the fleet can change them (design law 3).
"""

from __future__ import annotations

import ctypes
import hashlib
import heapq
import math
import struct
from collections.abc import Iterable

from solrl_ray.records import Candidate, Selection


class PromptSelection:
    """The running best floor(K / 2) and worst ceil(K / 2) of one prompt's pool.

    Holds K candidates and one flag per seed, however large the pool::

        collecting ──add() × pool──► complete ──select()──► (best, worst)
    """

    def __init__(self, pool: int, keep: int, *, prompt_id: str) -> None:
        """
        Args:
            pool: N, seeds of the prompt; their indices are 0 … N-1.
            keep: K, how many are chosen; if odd, one more worst than best.
            prompt_id: of the candidates that `select` returns.

        Raises:
            ValueError: K is below 2 or above N.
        """
        if not 2 <= keep <= pool:
            raise ValueError(f"keep must lie between 2 and the pool's {pool}, got {keep}")
        self.pool = pool
        self.prompt_id = prompt_id
        self._best_size = keep // 2
        self._worst_size = keep - keep // 2
        self._seen = bytearray(pool)
        # A heap's root is its weakest member. Both sides order by (reward, -index), the worst side negated.
        self._best: list[tuple[float, int]] = []
        self._worst: list[tuple[float, int]] = []

    def add(self, index: int, reward: float) -> None:
        """Takes the proxy reward of one seed, rounded to float32.

        Raises:
            ValueError: the reward is not finite, the index is outside of the pool, or it was added before.
        """
        if not 0 <= index < self.pool:
            raise ValueError(f"index {index} of prompt {self.prompt_id} is outside of its pool of {self.pool}")
        if self._seen[index]:
            raise ValueError(f"index {index} of prompt {self.prompt_id} was added before")
        value = _float32(reward)
        if not math.isfinite(value):
            raise ValueError(f"reward of index {index} of prompt {self.prompt_id} is {reward}")
        self._seen[index] = 1
        _push(self._best, (value, -index), self._best_size)
        _push(self._worst, (-value, index), self._worst_size)

    @property
    def complete(self) -> bool:
        """Whether every seed of the pool has its reward."""
        return all(self._seen)

    def select(self) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
        """Best in falling and worst in rising order.

        Raises:
            ValueError: the pool is not complete.
        """
        if not self.complete:
            raise ValueError(f"prompt {self.prompt_id} has {sum(self._seen)} of {self.pool} rewards")
        best = [self._candidate(-minus_index, reward) for reward, minus_index in sorted(self._best)[::-1]]
        worst = [self._candidate(index, -minus_reward) for minus_reward, index in sorted(self._worst)[::-1]]
        return tuple(best), tuple(worst)

    def _candidate(self, index: int, reward: float) -> Candidate:
        return Candidate(prompt_id=self.prompt_id, index=index, reward=reward)


def selection_digest(selections: Iterable[Selection]) -> str:
    """SHA-256, hex, over what was chosen: the same for any order of `selections`.

    Hashed, by iteration and prompt id: both as netstrings, the numbers of best and of worst (uint32), then
    index (uint32) and float32 reward of each chosen candidate, all little-endian.

    Raises:
        ValueError: two selections are of the same iteration and prompt.
    """
    ordered = sorted(selections, key=lambda selection: (selection.iteration, selection.prompt_id))
    digest = hashlib.sha256()
    previous = None
    for selection in ordered:
        name = (selection.iteration, selection.prompt_id)
        if name == previous:
            raise ValueError(f"two selections of iteration {name[0]}, prompt {name[1]}")
        previous = name
        for text in (str(selection.iteration).encode(), selection.prompt_id.encode()):
            digest.update(b"%d:%s," % (len(text), text))
        digest.update(struct.pack("<II", len(selection.best), len(selection.worst)))
        for candidate in selection.chosen:
            digest.update(struct.pack("<If", candidate.index, candidate.reward))
    return digest.hexdigest()


def _push(heap: list[tuple[float, int]], item: tuple[float, int], size: int) -> None:
    if len(heap) < size:
        heapq.heappush(heap, item)
    else:
        heapq.heappushpop(heap, item)


def _float32(value: float) -> float:
    return ctypes.c_float(value).value  # too large becomes infinite, which the caller refuses
