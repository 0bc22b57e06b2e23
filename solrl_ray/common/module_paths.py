"""PEFT's rule for matching module paths with LoRA targets."""

from __future__ import annotations

from collections.abc import Iterable


def ends_in(path: str, ends: Iterable[str]) -> bool:
    """Whether an entry of `ends` is the whole `path`, or its end after a dot, as in PEFT's `target_modules`.

    ``blocks.0.to_q`` ends in ``to_q`` and in ``0.to_q``, not in ``q``.
    """
    return any(path == end or path.endswith(f".{end}") for end in ends)
