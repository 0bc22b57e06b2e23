"""Best and worst seeds of a prompt's pool, by their proxy rewards.

One total order decides everything: higher reward first, of equal rewards the smaller index first. `best` is
the front of that order and `worst` its back, so the K chosen indices are distinct whatever the ties, and
neither arrival order nor the fleet can change them (design law 3).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from collections.abc import Iterable

from solrl_ray.records import Candidate, Selection


class PromptSelection:
    """The best floor(K / 2) and worst ceil(K / 2) of one prompt's pool: ``add() × pool``, then ``select()``."""

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
        self._keep = keep
        self._rewards: dict[int, float] = {}

    def add(self, index: int, reward: float) -> None:
        """Takes the proxy reward of one seed, rounded to float32.

        Raises:
            ValueError: the reward is not finite, the index is outside of the pool, or it was added before.
        """
        if not 0 <= index < self.pool:
            raise ValueError(f"index {index} of prompt {self.prompt_id} is outside of its pool of {self.pool}")
        if index in self._rewards:
            raise ValueError(f"index {index} of prompt {self.prompt_id} was added before")
        value = ctypes.c_float(reward).value  # too large becomes infinite
        if not math.isfinite(value):
            raise ValueError(f"reward of index {index} of prompt {self.prompt_id} is {reward}")
        self._rewards[index] = value

    @property
    def complete(self) -> bool:
        """Whether every seed of the pool has its reward."""
        return len(self._rewards) == self.pool

    def select(self) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
        """Best in falling and worst in rising order.

        Raises:
            ValueError: the pool is not complete.
        """
        if not self.complete:
            raise ValueError(f"prompt {self.prompt_id} has {len(self._rewards)} of {self.pool} rewards")
        order = sorted(self._rewards.items(), key=lambda item: (-item[1], item[0]))
        ranked = [Candidate(prompt_id=self.prompt_id, index=index, reward=reward) for index, reward in order]
        half = self._keep // 2
        return tuple(ranked[:half]), tuple(ranked[::-1][: self._keep - half])


def selection_digest(selections: Iterable[Selection]) -> str:
    """SHA-256, hex, over what was chosen: the same for any order of `selections`.

    Hashed, by iteration and prompt id: both as netstrings, the numbers of best and of worst (uint32), then
    index (uint32) and float32 reward of each chosen candidate, all little-endian.

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
