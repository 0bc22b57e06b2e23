"""A reward's cache of encoded prompts. Each prompt is encoded once, alone, so the result does not depend on a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from solrl_ray.config.problems import counted

logger = logging.getLogger(__name__)


KEPT = 1024
"""Number of cached prompts: more than an iteration or an evaluation uses, and only a few MB of features."""


class Texts:
    """Tensors by prompt; the `KEPT` most recently used ones are cached.

    Prompts with more than `limit` tokens are truncated and counted. The 1st, 2nd, 4th, 8th … of them is logged.
    """

    def __init__(self, name: str, encode: Callable[[str], Tensor], count: Callable[[str], int], limit: int) -> None:
        """
        Args:
            name: name of the reward, for messages.
            encode: computes the tensor of a prompt, truncated to `limit` tokens.
            count: counts the tokens of a whole prompt, including special tokens.
            limit: maximum number of tokens of a prompt.
        """
        self._name = name
        self._encode = encode
        self._count = count
        self._limit = limit
        self._of = lru_cache(maxsize=KEPT)(self._one)
        self._cut: set[int] = set()
        """Hashes of all truncated prompts, including those that are no longer cached."""

    @property
    def truncated(self) -> int:
        """Number of distinct prompts truncated so far."""
        return len(self._cut)

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """The stacked tensors of the prompts, [B, ...]."""
        return torch.stack([self._of(prompt) for prompt in prompts])

    def _one(self, prompt: str) -> Tensor:
        tokens = self._count(prompt)
        if tokens > self._limit and hash(prompt) not in self._cut:
            self._cut.add(hash(prompt))
            if self.truncated.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …: a prompt set may have thousands
                cut = f"{self._name}: a prompt of {tokens} tokens is cut to {self._limit}"
                logger.warning("%s (%s cut so far): %.60s", cut, counted(self.truncated, "prompt"), prompt)
        return self._encode(prompt)
