"""The text side of a checkpoint: encoders and tokenizers in their stock pipeline, and prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from solrl_ray.common.progress_note import progress_note

COUNTED = 1000
"""Prompts that are tokenised together to count their tokens; 20,000 at once take 0.4 GB."""


class TextEncoders(nn.Module):
    """A family's text encoders and tokenizers inside its stock pipeline, whose `encode_prompt` is used."""

    def __init__(self, pipeline_class: Any, encoders: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: encoder for name, encoder in encoders.items() if encoder is not None})
        given = {**encoders, **tokenizers}
        self.parts = {name: part for name, part in given.items() if part is not None}
        self.pipeline = pipeline_class(scheduler=None, vae=None, transformer=None, **given)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Prompts that one tokenizer truncates."""

    tokenizer: str
    limit: int
    """Tokens that it keeps, including its special tokens."""
    texts: tuple[str, ...]

    @classmethod
    def by(cls, tokenizer: str, counts: Callable[[Sequence[str]], list[int]], limit: int, texts: Sequence[str]) -> Self:
        """Those of `texts` that have more than `limit` tokens; `counts` gives the tokens of each."""
        long: list[str] = []
        for start in range(0, len(texts), COUNTED):
            part = texts[start : start + COUNTED]
            with progress_note(f"counting tokens of {tokenizer}, {start:,} of {len(texts):,} prompts"):
                lengths = counts(part)
            long += [text for text, length in zip(part, lengths, strict=True) if length > limit]
        return cls(tokenizer=tokenizer, limit=limit, texts=tuple(long))


def tokenizer_of(encoder: str) -> str:
    """The checkpoint part of an encoder's tokenizer: ``text_encoder_2`` has ``tokenizer_2``."""
    return "tokenizer" + encoder.removeprefix("text_encoder")
