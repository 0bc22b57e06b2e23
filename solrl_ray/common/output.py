"""Prints a command's output in any locale, also after its reader (a pipe, a terminal) has closed; formats tables."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


def settle() -> None:
    """Print characters that the locale lacks as ``?``; if standard output is closed, discard everything."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a pipe in place of a file keeps its settings
            sys.stdout.reconfigure(errors="replace")


def drop() -> None:
    """Discard everything printed from now on, and the output that could not be written before."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # not a file, so it cannot be closed
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)


@contextmanager
def lost_if_refused() -> Iterator[None]:
    """Discard output printed in the block if it cannot be written, so that a run continues without it."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        drop()


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
