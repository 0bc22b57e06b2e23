"""What a reward keeps of each prompt: computed once, alone, and so a function of the prompt and not of its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


KEPT = 1024
"""Prompts: more than an iteration or an evaluation comes back to, and a few MB of features on a device."""


class Texts:
    """Tensors by prompt, of which the last `KEPT` are kept. A prompt longer than `limit` tokens is cut, with a warning
    and a count."""

    def __init__(self, name: str, encode: Callable[[str], Tensor], count: Callable[[str], int], limit: int) -> None:
        """Args:
        name: the reward's.
        encode: prompt to its tensor, cut to `limit` tokens.
        count: tokens of a prompt that is not cut, special ones included.
        """
        self._name = name
        self._encode = encode
        self._count = count
        self._limit = limit
        self._of = lru_cache(maxsize=KEPT)(self._one)
        self._cut: set[int] = set()
        """Hashes of the prompts that were cut: also of those whose tensors are not kept any more."""

    @property
    def truncated(self) -> int:
        """Distinct prompts that were cut so far."""
        return len(self._cut)

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """[B, ...], the prompts' tensors stacked."""
        return torch.stack([self._of(prompt) for prompt in prompts])

    def _one(self, prompt: str) -> Tensor:
        tokens = self._count(prompt)
        if tokens > self._limit and hash(prompt) not in self._cut:
            self._cut.add(hash(prompt))
            cut = f"{self._name}: a prompt of {tokens} tokens is cut to {self._limit}"
            logger.warning("%s (%d prompts cut so far): %.60s", cut, self.truncated, prompt)
        return self._encode(prompt)
