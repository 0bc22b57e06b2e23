"""What this process is doing, in words for the user: ``loading the transformer``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_said: list[str] = []
"""Nested: the last is a part of those before."""


@contextmanager
def progress_note(words: str) -> Iterator[None]:
    """State what the ``with`` block does, while it runs.

    >>> with progress_note("loading the transformer"):
    ...     now()
    'loading the transformer'
    >>> now()
    ''
    """
    _said.append(words)
    try:
        yield
    finally:
        _said.pop()


def now() -> str:
    """What is being done; else empty. May be called from any thread."""
    return _said[-1] if _said else ""
