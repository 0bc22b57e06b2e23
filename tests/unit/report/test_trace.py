"""The timeline of a run, from spans with known numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from solrl_ray.report.trace import FILE, Span, TraceWriter

NOON = 1_700_000_000.0


def unit(stage: str, iteration: int, worker: str, started: float, seconds: float) -> Span:
    return Span(
        kind="unit",
        name=f"{stage}/{iteration}/p/{started:g}",
        stage=stage,
        iteration=iteration,
        worker=worker,
        started=NOON + started,
        seconds=seconds,
    )


SPANS = (
    unit("explore", 0, "explorer-0", 0.0, 2.0),
    unit("explore", 0, "explorer-1", 0.5, 3.0),
    unit("explore", 0, "explorer-0", 2.25, 1.0),
    Span(kind="stage", name="learning", stage="learn", iteration=0, started=NOON + 6, seconds=2.0),
    unit("evaluate", 0, "regenerator-0", 12.0, 1.0),
)


def written(folder: Path, *spans: Span) -> list[dict[str, Any]]:
    """The events of the file after a process has written these spans; the end of its array is missing."""
    writer = TraceWriter(folder)
    for span in spans:
        writer.write(span)
    writer.close()
    found: list[dict[str, Any]] = json.loads((folder / FILE).read_text().rstrip(",\n") + "]")
    return found


def tracks(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Group and track → (start, duration) of its events in seconds since noon."""
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            track = groups[event["pid"]], names[event["pid"], event["tid"]]
            found.setdefault(track, []).append((event["ts"] / 1e6 - NOON, event["dur"] / 1e6))
    return found


def test_each_worker_and_each_stage_has_a_track(tmp_path: Path) -> None:
    events = written(tmp_path, *SPANS)
    assert tracks(events) == {
        ("workers", "explorer-0"): [(0.0, 2.0), (2.25, 1.0)],
        ("workers", "explorer-1"): [(0.5, 3.0)],
        ("workers", "regenerator-0"): [(12.0, 1.0)],
        ("stages", "learn"): [(6.0, 2.0)],
    }
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"explore", "learn", "evaluate"}


def test_a_span_is_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    writer.write(SPANS[0])
    assert SPANS[0].name in (tmp_path / FILE).read_text()
    writer.close()


def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    written(tmp_path, *SPANS[:3])
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-20])
    assert tracks(written(tmp_path, unit("explore", 1, "explorer-0", 9.0, 2.0))) == {
        ("workers", "explorer-0"): [(0.0, 2.0), (9.0, 2.0)],
        ("workers", "explorer-1"): [(0.5, 3.0)],
    }
