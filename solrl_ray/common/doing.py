"""What this process is doing, in words, for whoever watches it: ``loading the transformer, 3 of 12 shards``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_said: list[str] = []
"""What is being done; the last is a part of those before."""


@contextmanager
def doing(words: str) -> Iterator[None]:
    """Say what the ``with`` block does, while it lasts.

    >>> with doing("loading the transformer"):
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
    """What is being done, and how far its progress bar is if it has one; empty if nothing was said.

    May be called from any thread. Libraries that load checkpoints show bars, and nothing else says how far they are.
    """
    said = _said[-1:]
    return ", ".join(part for part in (*said, _bar()) if part) if said else ""


def _bar() -> str:
    """How far the newest progress bar of this process is; empty if it cannot be read."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)  # not there yet while the library is being imported
    if tqdm is None:
        return ""
    try:
        return _newest(tqdm)
    except Exception:  # a bar that another thread changes, or one that a library made its own way: as without a bar
        return ""


def _newest(tqdm: Any) -> str:
    with tqdm.get_lock():  # as tqdm's own monitor reads them
        bars = [bar for bar in tqdm._instances.copy() if getattr(bar, "total", None) and hasattr(bar, "start_t")]
    if not bars:
        return ""
    newest = max(bars, key=lambda bar: float(bar.start_t))
    named = str(newest.desc or "").rstrip(": ")
    if newest.unit == "B":
        return f"{newest.n / 1e9:.1f} of {newest.total / 1e9:.1f} GB" + (f" of {named}" if named else "")
    return f"{newest.n} of {newest.total} {named.rpartition(' ')[2]}".rstrip()
