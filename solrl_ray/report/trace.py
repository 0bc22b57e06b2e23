"""``solrl trace``: the spans of a run, and their timeline for Perfetto and chrome://tracing.

``spans.jsonl`` in the run folder has one object a line. A worker measures a unit's span, the controller a stage's;
clocks of different machines may differ. The file is no part of the run's state, and a resumed run appends to it.

Timeline: the Trace Event Format of Chrome, JSON object form, complete events (``ph: X``), times in microseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter

from solrl_ray.common.files import read_regular
from solrl_ray.errors import UserError

FILE = "spans.jsonl"
UNIT_STAGES = {stage: stage for stage in ("explore", "regenerate", "evaluate")} | {"sample": "explore"}
"""Stage of a unit → stage of an iteration."""


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

    @property
    def ended(self) -> float:
        return self.started + self.seconds


_SPAN = TypeAdapter(Span)


class SpanWriter:
    """Appends spans; each is given to the operating system on return, which is enough for a timeline."""

    def __init__(self, folder: Path) -> None:
        self._file: IO[str] = (folder / FILE).open("a")
        self._file.write("\n")  # ends a line that a killed process left

    def write(self, span: Span) -> None:
        self._file.write(json.dumps(asdict(span)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_spans(folder: Path) -> list[Span]:
    """The spans that a run keeps, by start. Incomplete or damaged lines are skipped.

    Raises UserError: the run has no spans.
    """
    path = folder / FILE
    if not path.is_file():
        raise UserError(
            f"{folder} has no {FILE}: the run has not started its workers, is of an older version, or was fetched from "
            "an upload, which leaves it out."
        )
    spans = []
    for line in read_regular(path).splitlines():
        with suppress(ValueError, RecursionError):  # incomplete or damaged
            spans.append(_SPAN.validate_json(line))
    return sorted(spans, key=lambda span: (span.started, span.name))


def timeline(spans: Sequence[Span]) -> dict[str, Any]:
    """The trace: one track a stage, one a worker; times count from the first span.

    In each iteration, stages of units (``explore``, ``regenerate``) reach from the first unit's start to the last one's
    end; the controller's stages are as it measured them.
    """
    zero = min((span.started for span in spans), default=0.0)
    at_work = [span for span in spans if span.kind != "stage"]
    stages = [span for span in spans if span.kind == "stage"]
    stages += _unit_stages(span for span in at_work if span.kind == "unit")
    events: list[dict[str, Any]] = []
    for process, (kind, members) in enumerate((("stage", stages), ("worker", at_work)), start=1):
        events.append(_named("process_name", process, 0, f"{kind}s"))
        tracks = defaultdict[str, list[Span]](list)
        for span in members:
            tracks[getattr(span, kind)].append(span)
        for number, (track, on_it) in enumerate(sorted(tracks.items()), start=1):
            events.append(_named("thread_name", process, number, track))
            events += _complete(on_it, process, number, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"zero": zero}}


def _unit_stages(units: Iterable[Span]) -> list[Span]:
    """Exploring and regenerating, iteration by iteration; evaluations are stages of the controller."""
    groups = defaultdict[tuple[str, int], list[Span]](list)
    for span in units:
        if span.stage != "evaluate":
            groups[UNIT_STAGES[span.stage], span.iteration].append(span)
    return [
        Span(
            kind="stage",
            name=f"{stage} {iteration}",
            stage=stage,
            iteration=iteration,
            started=(first := min(span.started for span in group)),
            seconds=max(span.ended for span in group) - first,
        )
        for (stage, iteration), group in groups.items()
    ]


def _complete(spans: list[Span], process: int, track: int, zero: float) -> list[dict[str, Any]]:
    """Events of one track, made not to overlap: NTP may set the wall clock back a little."""
    ordered = sorted(spans, key=lambda span: span.started)
    ends = [span.started for span in ordered[1:]] + [float("inf")]
    return [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.stage,
            "pid": process,
            "tid": track,
            "ts": (span.started - zero) * 1e6,
            "dur": (min(span.ended, end) - span.started) * 1e6,
            "args": {"iteration": span.iteration},
        }
        for span, end in zip(ordered, ends, strict=True)
    ]


def _named(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}
