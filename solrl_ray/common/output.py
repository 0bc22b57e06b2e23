"""The output of a command: its tables, in any locale, and of a run also where nobody reads it any more."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


def settle() -> None:
    """Print characters that the locale lacks as ``?``; an output that was closed before takes all."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a pipe that took a file's place keeps its way
            sys.stdout.reconfigure(errors="replace")


def drop() -> None:
    """Lose what is printed from now on, and what could not be written before."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # no file: nobody can close it
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)


@contextmanager
def lost_if_refused() -> Iterator[None]:
    """What is printed here is lost if it cannot be written; a run goes on without it."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        drop()


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text, with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
