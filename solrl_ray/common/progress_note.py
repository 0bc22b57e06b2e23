"""Describes the current work of this process for the user: ``loading the transformer``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_notes: list[str] = []
"""Nested descriptions, the innermost last."""


@contextmanager
def progress_note(words: str) -> Iterator[None]:
    """Describe the work of the ``with`` block while it runs.

    >>> with progress_note("loading the transformer"):
    ...     now()
    'loading the transformer'
    >>> now()
    ''
    """
    _notes.append(words)
    try:
        yield
    finally:
        _notes.pop()


def now() -> str:
    """Description of the current work; empty if there is none. May be called from any thread."""
    return _notes[-1] if _notes else ""
