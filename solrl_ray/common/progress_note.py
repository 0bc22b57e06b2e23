"""What this process is doing, in words for the user: ``loading the transformer, 3 of 12 shards``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    """What is being done, with the state of its progress bar if it has one; else empty.

    May be called from any thread. Libraries that load checkpoints report progress only by such bars.
    """
    said = _said[-1:]
    return ", ".join(part for part in (*said, _bar()) if part) if said else ""


def _bar() -> str:
    """State of this process's newest progress bar; empty if it cannot be read."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)  # incomplete while the library is being imported
    if tqdm is None:
        return ""
    try:
        return _newest(tqdm)
    except Exception:  # another thread changed the bar, or it is a library's own kind: as without a bar
        return ""


def _newest(tqdm: Any) -> str:
    with tqdm.get_lock():  # as tqdm's own monitor does
        bars = [bar for bar in tqdm._instances.copy() if getattr(bar, "total", None) and hasattr(bar, "start_t")]
    if not bars:
        return ""
    newest = max(bars, key=lambda bar: float(bar.start_t))
    named = str(newest.desc or "").rstrip(": ")
    if newest.unit == "B":
        return f"{newest.n / 1e9:.1f} of {newest.total / 1e9:.1f} GB" + (f" of {named}" if named else "")
    return f"{newest.n} of {newest.total} {named.rpartition(' ')[2]}".rstrip()
