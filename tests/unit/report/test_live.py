"""The live view: what a terminal shows, and the lines that a log gets instead."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from solrl_ray.metrics.records import Event, Progress
from solrl_ray.report.live import LiveView, PlainLines, duration, render, sparkline

HALFWAY = Progress(
    run="small [world]",
    state="exploring",
    iteration=7,
    iterations=20,
    stages={"explore": (31, 48), "regenerate": (5, 12), "learn": (0, 1)},
    train_rewards=(0.20, 0.22, 0.28),
    heldout=((0, "base", 0.224, 0.011), (0, "real", 0.888, 0.004), (5, "ema", 0.251, 0.010)),
    spearman=(0.93, 0.91, 0.94),
    workers={f"explorer-{number}": "explore/7/9f/0-24" for number in range(12)},
    events=(Event.now(7, "lost", "explorer-1 was lost; 2 units requeued"),),
    elapsed=63.2,
    remaining=117.0,
)


def shown(progress: Progress, *, width: int = 100, since_update: float = 0.0) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(progress, since_update=since_update))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([0.0, 0.5, 1.0], 30, "▁▅█"),
        ([2.0, 2.0], 30, "▅▅"),
        ([0.0, math.nan, 1.0], 30, "▁ █"),
        ([math.nan], 30, " "),
        ([], 30, ""),
        ([9.0, 0.0, 1.0], 2, "▁█"),
    ],
)
def test_a_sparkline_runs_from_the_least_to_the_greatest_of_the_newest(values: list, width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (63.2, "1:03"), (59.7, "1:00"), (3725, "1:02:05"), (-1, "-:--"), (math.inf, "-:--")],
)
def test_durations_read_as_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_panel_shows_progress_rewards_fidelity_and_workers() -> None:
    text = shown(HALFWAY)
    assert "small [world]" in text
    assert "iteration 8 of 20" in text
    assert "31/48" in text
    assert "0.224 ± 0.011" in text
    assert "0.251 ± 0.010" in text
    assert "0.200 → 0.280" in text
    assert "Spearman 0.940" in text
    assert "explorer-1 was lost" in text
    assert "and 4 more" in text
    assert "about 1:57 left" in text


def test_what_those_do_that_start_stands_before_the_others() -> None:
    notes = {"explorer-9": "loading transformer, 3 of 12 shards", "learner-0": "joining the learner group at 10.0.0.1"}
    text = shown(replace(HALFWAY, notes=notes))
    said = [text.index(words) for words in ("loading transformer, 3 of 12", "joining the learner group", "explore/7")]
    assert said == sorted(said)
    assert "and 5 more" in text
    assert "text_encoder" in shown(replace(HALFWAY, workers={}, notes={"text_encoder": "loading"}))


@pytest.mark.parametrize(
    ("changed", "since", "shows", "lacks"),
    [
        ({}, 60.0, ["elapsed 2:03", "about 0:57 left"], "1:57"),
        ({"iteration": 20}, 0.0, ["iteration 20 of 20"], "iteration 21"),
        ({"heldout": ((1, "ema", 0.25, 0.01),)}, 0.0, ["held-out, 1 update "], "updates"),
        ({"train_rewards": (math.nan,), "spearman": (math.nan,), "stages": {"explore": (3, 0)}}, 0.0, ["3/0"], "31/48"),
        ({"state": "done", "remaining": 9.0}, 0.0, ["done"], "left"),
    ],
)
def test_the_panel_at_the_edges(changed: dict, since: float, shows: list[str], lacks: str) -> None:
    text = shown(replace(HALFWAY, **changed), since_update=since)
    assert [words for words in shows if words not in text] == []
    assert lacks not in text


def test_eighty_columns_are_wide_enough_for_a_long_run() -> None:
    many = tuple(n / 100 for n in range(200))
    heldout = tuple((n, "ema", -10.0 - n, 10.125) for n in range(0, 1201, 20))
    text = shown(replace(HALFWAY, train_rewards=many, spearman=many, heldout=heldout), width=80)
    assert "held-out, 1200 updates" in text
    assert "-1210.000 ± 10.125" in text
    assert text.count("█") >= 3  # the newest of each, in a rising or falling line


@pytest.mark.parametrize("width", [1, 7, 400])
def test_any_terminal_width_and_an_empty_snapshot_are_survived(width: int) -> None:
    assert shown(HALFWAY, width=width)
    assert shown(Progress(run="r", state="starting explorers", iteration=0, iterations=1), width=width)


def test_a_log_gets_each_piece_of_news_once() -> None:
    lines = PlainLines()
    start = Progress(run="r", state="exploring", iteration=0, iterations=2, elapsed=1.0)
    first = replace(start, state="learning", elapsed=9.0, train_rewards=(0.3,), spearman=(0.95,), remaining=8.0)
    second = replace(first, state="exploring", iteration=1, elapsed=10.0, heldout=((1, "ema", 0.31, 0.02),))
    assert lines.lines(start) == ["[   0:01] exploring"]
    assert lines.lines(start) == []
    assert lines.lines(first) == [
        "[   0:09] iteration 1/2: training reward 0.3000, Spearman 0.950, about 0:08 left",
        "[   0:09] learning",
    ]
    assert lines.lines(second) == ["[   0:10] held-out reward after 1 update: 0.310 ± 0.020"]


def test_a_log_without_news_for_half_a_minute_tells_how_far_the_run_is() -> None:
    lines = PlainLines()
    stages = {"explore": (3, 12), "regenerate": (1, 12), "learn": (1, 1)}
    start = Progress(run="r", state="exploring", iteration=0, iterations=2, elapsed=1.0, stages=stages)
    alike = {f"explorer-{number}": "loading transformer, 3 of 12 shards" for number in range(8)}
    notes = alike | {f"learner-{number}": f"loading {number} of 9" for number in range(5)}
    assert lines.lines(start) == ["[   0:01] exploring"]
    assert lines.lines(replace(start, elapsed=30.9)) == []
    assert lines.lines(replace(start, elapsed=31.0)) == ["[   0:31] exploring · explore 3/12 · regenerate 1/12"]
    assert lines.lines(replace(start, elapsed=90.0)) == []  # nothing has changed
    further = replace(start, elapsed=91.0, stages={"explore": (12, 12)}, notes=alike)
    said = "exploring · explorer-0 and 7 more: loading transformer, 3 of 12 shards"
    assert lines.lines(further) == [f"[   1:31] {said}"]
    lost = (Event.now(0, "lost", "one was lost"),)
    assert lines.lines(replace(further, elapsed=122.0, events=lost)) == ["[   2:02] one was lost"]
    told = replace(further, notes=notes)
    assert lines.lines(replace(told, elapsed=151.9)) == []  # other news puts it off
    (line,) = lines.lines(replace(told, elapsed=152.0))
    assert line.endswith(
        f"{said}; learner-0: loading 0 of 9; learner-1: loading 1 of 9; learner-2: loading 2 of 9; and 2 others"
    )


@pytest.mark.parametrize("stages", [{}, {"explore": (12, 12), "learn": (1, 1)}, {"explore": (0, 0)}])
def test_a_log_tells_nothing_of_stages_if_none_is_under_way(stages: dict[str, tuple[int, int]]) -> None:
    lines = PlainLines()
    start = Progress(run="r", state="learning", iteration=0, iterations=2, elapsed=1.0, stages=stages)
    assert lines.lines(start) == ["[   0:01] learning"]
    assert lines.lines(replace(start, elapsed=61.0)) == []


def test_a_log_of_a_resumed_run_begins_with_the_newest_of_what_was_made_before() -> None:
    lines = PlainLines()
    assert lines.lines(Progress(run="r", state="starting", iteration=0, iterations=20)) == ["[   0:00] starting"]
    before = replace(HALFWAY, state="starting workers", events=(), remaining=None)
    assert lines.lines(before) == [
        "[   1:03] iteration 3/20: training reward 0.2800, Spearman 0.940",
        "[   1:03] held-out reward after 5 updates: 0.251 ± 0.010",
        "[   1:03] starting workers",
    ]
    after = replace(before, train_rewards=(*before.train_rewards, 0.3, 0.4), remaining=2.0)
    assert lines.lines(after) == [
        "[   1:03] iteration 4/20: training reward 0.3000, about 0:02 left",
        "[   1:03] iteration 5/20: training reward 0.4000, about 0:02 left",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_all_events_are_asked_for_once_and_a_panel_keeps_the_newest(terminal: bool) -> None:
    said = [Event.now(0, "lost", f"explorer-{number} was lost") for number in range(20)]
    console = Console(file=(output := io.StringIO()), width=80, height=40, force_terminal=terminal, color_system=None)
    with LiveView(console) as view:
        for known in (0, 11, 11, 20):  # so many there are at each request
            start = Progress(run="r", state="exploring", iteration=0, iterations=1)
            view.update(replace(start, events=tuple(said[view.seen : known])))
    shown = output.getvalue()
    if terminal:
        panel = shown[shown.rindex("╭") :]
        assert [n for n in range(20) if f"explorer-{n} was lost" in panel] == [16, 17, 18, 19]
    else:
        assert [shown.count(event.what) for event in said] == [1] * 20


@pytest.mark.parametrize(("terminal", "plain"), [(False, False), (True, True), (True, False)])
def test_a_panel_on_a_terminal_and_plain_lines_elsewhere_or_where_asked_for(terminal: bool, plain: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, width=80, height=40, force_terminal=terminal, color_system=None)
    with LiveView(console, plain=plain) as view:
        view.update(HALFWAY)
        view.update(replace(HALFWAY, state="done"))
    text = output.getvalue()
    panel = terminal and not plain
    assert ("╭" in text) == ("\x1b" in text) == panel
    assert text.count("iteration 3/20: training reward 0.2800, Spearman 0.940") == (0 if panel else 1)
    assert "done" in text  # the last panel stays
