"""Whether a module is one of LoRA's targets, by PEFT's rule for names."""

from __future__ import annotations

from collections.abc import Iterable


def ends_in(path: str, ends: Iterable[str]) -> bool:
    """PEFT's rule for a list of `target_modules`: an entry is a module's whole path, or its end after a dot.

    ``blocks.0.to_q`` ends in ``to_q`` and in ``0.to_q``, not in ``q``.
    """
    return any(path == end or path.endswith(f".{end}") for end in ends)
