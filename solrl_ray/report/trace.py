"""The timeline of a run: ``trace.json`` in its folder, for https://ui.perfetto.dev and chrome://tracing.

A worker measures a unit's span, the controller a stage's; clocks of different machines may differ. The file is no part
of the run's state, and a resumed run appends to it.

Trace Event Format of Chrome, a JSON array whose end may be missing: complete events (``ph: X``), one a line, on a track
for each stage and each worker. Times are microseconds since 1970.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

FILE = "trace.json"
UNIT_STAGES = {stage: stage for stage in ("explore", "regenerate", "evaluate")} | {"sample": "explore"}
"""Stage of a unit → stage of an iteration."""
STAGES, WORKERS = 1, 2
"""Numbers of the two groups of tracks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    kind: Literal["unit", "work", "stage"]
    name: str
    """Unit id, or the words of the worker (``work``) or the controller (``stage``) for what it does."""
    stage: str
    """``explore``, ``regenerate``, ``evaluate`` for a unit; ``start`` for other work; ``learn``, ``publish``, … for the
    controller.
    """
    iteration: int
    started: float
    """Seconds since 1970."""
    seconds: float
    worker: str = ""
    """For a unit and for work."""


class TraceWriter:
    """Appends spans; each is given to the operating system on return, which is enough for a timeline."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        there = path.read_bytes() if path.is_file() else b""
        self._file: IO[str] = path.open("a")
        self._file.truncate(there.rfind(b"\n") + 1)  # a power failure may have cut the last line
        self._named: set[int] = set()
        if not there:
            self._file.write("[\n")
            for group, name in ((STAGES, "stages"), (WORKERS, "workers")):
                self._write(ph="M", name="process_name", pid=group, args={"name": name})

    def write(self, span: Span) -> None:
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
