"""What a reward keeps of each prompt: computed once, alone, and so a function of the prompt and not of its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Texts:
    """A cache of tensors by prompt. A prompt longer than `limit` tokens is cut, with a warning and a count."""

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
        self._known: dict[str, Tensor] = {}
        self.truncated = 0
        """Distinct prompts that were cut so far."""

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """[B, ...], the prompts' tensors stacked."""
        return torch.stack([self._one(prompt) for prompt in prompts])

    def _one(self, prompt: str) -> Tensor:
        if prompt not in self._known:
            tokens = self._count(prompt)
            if tokens > self._limit:
                self.truncated += 1
                logger.warning(
                    "%s: a prompt of %d tokens is cut to %d (%d prompts cut so far): %.60s",
                    self._name,
                    tokens,
                    self._limit,
                    self.truncated,
                    prompt,
                )
            self._known[prompt] = self._encode(prompt)
        return self._known[prompt]
