"""Splits a command's time into phases, by the spans of its run; each moment has one phase. For `rehearsal.py`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from solrl_ray.report.trace import FILE, Span

NOTES = {
    "compiling": "compiling",
    "warming": "compiling",
    "loading": "reading files",
    "moving": "moving",
    "quantising": "quantising",
    "making": "quantising",
    "building": "building",
    "testing": "self-tests",
    "taking": "digest of text encoders",
    "encoding": "encoding",
}
"""First word of a worker's note on its activity → phase."""
UNITS = {"evaluate": "evaluation", "explore": "exploring", "sample": "exploring", "regenerate": "regenerating"}
STAGES = {
    "encode": "encoding",
    "learn": "learning",
    "publish": "publishing",
    "checkpoint": "checkpoint",
    "evaluate": "evaluation",
    "report": "report",
    "start": "starting workers",
}
BEFORE, AFTER, REST = "starting the command", "ending the command", "rest"
ORDER = tuple(dict.fromkeys((BEFORE, AFTER, *NOTES.values(), *UNITS.values(), *STAGES.values())))
"""Priority of phases: if several are active, the first one counts."""


def read_spans(run: Path) -> list[Span]:
    """A run's spans, sorted by start; empty if it has not started its workers."""
    file = run / FILE
    events = json.loads(file.read_text().rstrip(",\n") + "]") if file.exists() else []
    spans = [
        Span(
            name=event["name"],
            stage=event["cat"],
            started=event["ts"] / 1e6,
            seconds=event["dur"] / 1e6,
            **event["args"],
        )
        for event in events
        if event["ph"] == "X"
    ]
    return sorted(spans, key=lambda span: (span.started, span.name))


def ended(span: Span) -> float:
    return span.started + span.seconds


def phases(spans: Sequence[Span], began: float, end: float) -> dict[str, float]:
    """Phase → seconds of the command, in `ORDER`; they add up to `end` - `began` (both in seconds since 1970)."""
    seconds = defaultdict[str, float](float)
    for phase, start, stop in owned(spans, began, end):
        seconds[phase] += stop - start
    return {phase: round(seconds[phase], 3) for phase in (*ORDER, REST) if phase in seconds}


def owned(spans: Sequence[Span], began: float, end: float) -> list[tuple[str, float, float]]:
    """The command's time as consecutive intervals (phase, start, end)."""
    claims = [(phase, span.started, ended(span)) for span in spans if (phase := phase_of(span))]
    first = min((span.started for span in spans), default=end)
    last = max(map(ended, spans), default=end)
    claims += [(BEFORE, began, first), (AFTER, last, end)]
    clipped = [(phase, max(start, began), min(stop, end)) for phase, start, stop in claims]
    edges = sorted({began, end, *(edge for _, *both in clipped for edge in both if began < edge < end)})
    pieces: list[tuple[str, float, float]] = []
    for start, stop in pairwise(edges):
        active = {phase for phase, from_, to in clipped if from_ <= start and stop <= to}
        pieces.append((next((phase for phase in ORDER if phase in active), REST), start, stop))
    return pieces


def phase_of(span: Span) -> str:
    """The phase of a span; empty for the controller's ``rollout``, whose units have phases."""
    if span.worker and span.stage == "start":  # before the worker's first unit
        return NOTES.get(span.name.split(" ")[0], STAGES["start"])
    return UNITS.get(span.stage, "") if span.worker else STAGES.get(span.stage, "")


def first_exploring(spans: Sequence[Span], began: float) -> float | None:
    """Seconds from the command to the first preview, without earlier evaluations; None if there is no preview."""
    starts = [span.started for span in spans if span.worker and phase_of(span) == "exploring"]
    if not starts:
        return None
    first = min(starts)
    evaluated = sum(
        span.seconds for span in spans if not span.worker and span.stage == "evaluate" and ended(span) <= first
    )
    return round(first - began - evaluated, 3)


def peaks(seen: Iterable[tuple[float, float]], pieces: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Phase → peak GB, from samples (seconds since 1970, GB); phases without a sample are left out."""
    samples = list(seen)
    most: dict[str, float] = {}
    for phase, start, end in pieces:
        for at, gb in samples:
            if start <= at < end:
                most[phase] = max(gb, most.get(phase, 0.0))
    return most
