"""Timeline of a run: ``trace.json`` in its folder, for https://ui.perfetto.dev and chrome://tracing.

Workers measure the spans of units, the controller those of stages; clocks of different machines may differ. The file is
not part of the run's state. A resumed run appends to it.

The format is Chrome's Trace Event Format: a JSON array whose end may be missing. It has complete events (``ph: X``),
one per line, on one track per stage and per worker. Times are in microseconds since 1970.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

FILE = "trace.json"
UNIT_STAGES = {stage: stage for stage in ("explore", "regenerate", "evaluate")} | {"sample": "explore"}
"""Stage of a work unit → stage of the iteration."""
STAGES, WORKERS = 1, 2
"""Process ids (``pid``) of the two groups of tracks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time on one track of the timeline."""

    kind: Literal["unit", "work", "stage"]
    """``unit``: a work unit; ``work``: other work of a worker; ``stage``: a stage of the controller."""
    name: str
    """Unit id, or a description of the work or stage."""
    stage: str
    """``explore``, ``regenerate``, ``evaluate`` for a unit; ``start`` for other work; ``learn``, ``publish``, … for the
    controller.
    """
    iteration: int
    started: float
    """Start, in seconds since 1970."""
    seconds: float
    """Duration."""
    worker: str = ""
    """Name of the worker; empty for a stage."""


class TraceWriter:
    """Appends spans to ``trace.json``. They are flushed to the operating system but not synced to the disk."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        content = path.read_bytes() if path.is_file() else b""
        self._file: IO[str] = path.open("a")
        whole = content.rfind(b"\n") + 1  # a power failure may have cut the last line
        self._file.truncate(whole)
        self._named: set[int] = set()
        if not whole:
            self._file.write("[\n")
            for group, name in ((STAGES, "stages"), (WORKERS, "workers")):
                self._write(ph="M", name="process_name", pid=group, args={"name": name})

    def write(self, span: Span) -> None:
        """Append one span, and the name of its track if it is new."""
        group, name = (WORKERS, span.worker) if span.worker else (STAGES, span.stage)
        track = zlib.crc32(name.encode())  # the same after a resume
        if track not in self._named:
            self._named.add(track)
            self._write(ph="M", name="thread_name", pid=group, tid=track, args={"name": name})
        self._write(
            ph="X",
            name=span.name,
            cat=span.stage,
            pid=group,
            tid=track,
            ts=span.started * 1e6,
            dur=span.seconds * 1e6,
            args={"kind": span.kind, "iteration": span.iteration, "worker": span.worker},
        )
        self._file.flush()

    def _write(self, **event: Any) -> None:
        self._file.write(f"{json.dumps(event)},\n")

    def close(self) -> None:
        self._file.close()
