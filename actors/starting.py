"""What every worker does differently while it starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Import and build without looking for garbage; what is there afterwards is never looked at again.

    Libraries and a model are a million objects that all stay. Searching them over and over while they are made takes
    a fifth of a worker's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
