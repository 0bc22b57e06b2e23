"""A reward's cache of prompts: each is computed once, alone, and so does not depend on its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from solrl_ray.config.problems import counted

logger = logging.getLogger(__name__)


KEPT = 1024
"""Prompts: more than an iteration or an evaluation returns to, and a few MB of features on a device."""


class Texts:
    """Tensors by prompt; the last `KEPT` are kept. Prompts over `limit` tokens are cut and counted.
    The 1st, 2nd, 4th, 8th … is told.
    """

    def __init__(self, name: str, encode: Callable[[str], Tensor], count: Callable[[str], int], limit: int) -> None:
        """
        Args:
            name: the reward's.
            encode: prompt to its tensor, truncated to `limit` tokens.
            count: tokens of a whole prompt, special ones included.
        """
        self._name = name
        self._encode = encode
        self._count = count
        self._limit = limit
        self._of = lru_cache(maxsize=KEPT)(self._one)
        self._cut: set[int] = set()
        """Hashes of all truncated prompts, including those whose tensors are gone."""

    @property
    def truncated(self) -> int:
        """Distinct prompts truncated so far."""
        return len(self._cut)

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """[B, ...], the prompts' tensors stacked."""
        return torch.stack([self._of(prompt) for prompt in prompts])

    def _one(self, prompt: str) -> Tensor:
        tokens = self._count(prompt)
        if tokens > self._limit and hash(prompt) not in self._cut:
            self._cut.add(hash(prompt))
            if self.truncated.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …: a prompt set may have thousands
                cut = f"{self._name}: a prompt of {tokens} tokens is cut to {self._limit}"
                logger.warning("%s (%s cut so far): %.60s", cut, counted(self.truncated, "prompt"), prompt)
        return self._encode(prompt)
