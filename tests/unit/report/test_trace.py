"""The timeline of a run, from spans with known numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.errors import UserError
from solrl_ray.report.trace import FILE, Span, SpanWriter, read_spans, timeline

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
    Span(kind="stage", name="learning", stage="learn", iteration=0, started=NOON + 6, seconds=2.0),
    unit("explore", 0, "explorer-0", 0.0, 2.0),
    unit("explore", 0, "explorer-1", 0.5, 3.0),
    unit("explore", 0, "explorer-0", 2.25, 1.0),
    unit("regenerate", 0, "regenerator-0", 3.0, 2.5),
    unit("explore", 1, "explorer-0", 9.0, 2.0),
    unit("evaluate", 0, "regenerator-0", 12.0, 1.0),
)


def tracks(spans: tuple[Span, ...] | list[Span]) -> dict[str, list[tuple[float, float]]]:
    """Track → (start, duration) of its events in seconds."""
    events = timeline(spans)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append((event["ts"] / 1e6, event["dur"] / 1e6))
    return found


def test_each_worker_and_each_stage_has_a_track_that_counts_from_the_first_span() -> None:
    assert tracks(SPANS) == {
        "explore": [(0.0, 3.5), (9.0, 2.0)],  # from the first start to the last end, an iteration each
        "regenerate": [(3.0, 2.5)],
        "learn": [(6.0, 2.0)],
        "explorer-0": [(0.0, 2.0), (2.25, 1.0), (9.0, 2.0)],
        "explorer-1": [(0.5, 3.0)],
        "regenerator-0": [(3.0, 2.5), (12.0, 1.0)],
    }
    kinds = {event["cat"] for event in timeline(SPANS)["traceEvents"] if event["ph"] == "X"}
    assert kinds == {"explore", "regenerate", "learn", "evaluate"}


def test_what_a_worker_does_before_its_units_is_on_its_track_and_in_no_stage() -> None:
    loading = Span(
        kind="work", name="loading transformer", stage="start", iteration=0, started=NOON, seconds=4.0, worker="a"
    )
    assert tracks([loading, unit("explore", 0, "a", 5.0, 1.0)]) == {
        "explore": [(5.0, 1.0)],
        "a": [(0.0, 4.0), (5.0, 1.0)],
    }


def test_a_clock_that_was_set_back_does_not_make_units_of_one_worker_overlap() -> None:
    spans = [unit("explore", 0, "explorer-0", 0.0, 1.0), unit("explore", 0, "explorer-0", 0.75, 1.0)]
    assert tracks(spans)["explorer-0"] == [(0.0, 0.75), (0.75, 1.0)]


def test_spans_of_a_killed_and_a_resumed_process_are_read_without_the_line_that_was_cut(tmp_path: Path) -> None:
    first = SpanWriter(tmp_path)
    for span in SPANS[:3]:
        first.write(span)
    first.close()
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-20])
    second = SpanWriter(tmp_path)
    second.write(SPANS[5])
    second.close()
    assert read_spans(tmp_path) == [SPANS[1], SPANS[0], SPANS[5]]


def test_a_folder_without_spans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no spans\.jsonl"):
        read_spans(tmp_path)
