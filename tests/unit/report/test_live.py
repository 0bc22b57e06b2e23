"""The live view: what a terminal shows, and the lines that a log gets instead."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from solrl_ray.metrics.records import Progress
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
    messages=("explorer-1 was lost; 2 units requeued",),
    elapsed=63.2,
    remaining=117.0,
)


def shown(progress: Progress, *, width: int = 100, since_update: float = 0.0) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(progress, since_update=since_update))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_sparkline_runs_from_the_least_to_the_greatest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▅▅"
    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert sparkline([math.nan]) == " "
    assert sparkline([]) == ""


def test_a_sparkline_keeps_the_newest_values() -> None:
    assert sparkline([9.0, 0.0, 1.0], width=2) == "▁█"


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


def test_a_log_tells_now_and_then_what_those_do_that_start() -> None:
    lines = PlainLines()
    alike = {f"explorer-{number}": "loading transformer, 3 of 12 shards" for number in range(8)}
    start = Progress(run="r", state="starting workers", iteration=0, iterations=2, elapsed=5.0, notes=alike)
    assert lines.lines(start) == ["[   0:05] starting workers"]
    told = "[   0:11] explorer-0 and 7 more: loading transformer, 3 of 12 shards; learner-0: loading transformer"
    both = alike | {"learner-0": "loading transformer"}
    assert lines.lines(replace(start, elapsed=11.0, notes=both)) == [told]
    assert lines.lines(replace(start, elapsed=12.0, notes=alike)) == []
    assert lines.lines(replace(start, elapsed=22.0, notes=both)) == []
    many = {f"explorer-{number}": f"loading transformer, {number} of 12 shards" for number in range(6)}
    (line,) = lines.lines(replace(start, elapsed=23.0, notes=many))
    assert line.endswith("explorer-3: loading transformer, 3 of 12 shards; and 2 others")


def test_the_clocks_run_on_between_snapshots() -> None:
    text = shown(HALFWAY, since_update=60.0)
    assert "elapsed 2:03" in text
    assert "about 0:57 left" in text


def test_a_done_run_does_not_count_past_its_last_iteration() -> None:
    assert "iteration 20 of 20" in shown(replace(HALFWAY, iteration=20))


def test_one_update_is_singular() -> None:
    assert "held-out, 1 update " in shown(replace(HALFWAY, heldout=((1, "ema", 0.25, 0.01),)))


def test_eighty_columns_are_wide_enough_for_a_long_run() -> None:
    many = tuple(n / 100 for n in range(200))
    heldout = tuple((n, "ema", -10.0 - n, 10.125) for n in range(0, 1201, 20))
    text = shown(replace(HALFWAY, train_rewards=many, spearman=many, heldout=heldout), width=80)
    assert "held-out, 1200 updates" in text
    assert "-1210.000 ± 10.125" in text
    assert text.count("█") >= 3  # the newest of each, in a rising or falling line


@pytest.mark.parametrize("width", [1, 2, 3, 7, 20, 61, 400])
def test_any_terminal_width_is_survived(width: int) -> None:
    assert shown(HALFWAY, width=width)


def test_values_that_are_not_finite_are_survived() -> None:
    broken = replace(HALFWAY, train_rewards=(math.nan,), spearman=(math.nan,), stages={"explore": (3, 0)})
    assert "3/0" in shown(broken)


def test_a_run_that_is_done_has_no_time_left() -> None:
    text = shown(replace(HALFWAY, state="done", remaining=9.0))
    assert "done" in text
    assert "left" not in text


def test_an_empty_snapshot_is_survived() -> None:
    assert "starting" in shown(Progress(run="r", state="starting explorers", iteration=0, iterations=1))


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
    assert lines.lines(second) == ["[   0:10] held-out reward: after 1 0.310 ± 0.020"]


def test_a_log_without_news_for_half_a_minute_tells_how_far_the_stages_are() -> None:
    lines = PlainLines()
    stages = {"explore": (3, 12), "regenerate": (1, 12), "learn": (1, 1)}
    start = Progress(run="r", state="exploring", iteration=0, iterations=2, elapsed=1.0, stages=stages)
    further = replace(start, stages=stages | {"explore": (12, 12), "regenerate": (5, 12)})
    assert lines.lines(start) == ["[   0:01] exploring"]
    assert lines.lines(replace(start, elapsed=30.9)) == []
    assert lines.lines(replace(start, elapsed=31.0)) == ["[   0:31] exploring · explore 3/12 · regenerate 1/12"]
    assert lines.lines(replace(start, elapsed=90.0)) == []
    assert lines.lines(replace(further, elapsed=91.0)) == ["[   1:31] exploring · regenerate 5/12"]
    assert lines.lines(replace(start, elapsed=120.9)) == []
    assert lines.lines(replace(start, elapsed=121.0)) == ["[   2:01] exploring · explore 3/12 · regenerate 1/12"]


def test_any_other_news_puts_off_how_far_the_stages_are() -> None:
    lines = PlainLines()
    start = Progress(run="r", state="exploring", iteration=0, iterations=2, elapsed=1.0, stages={"explore": (3, 12)})
    assert lines.lines(start) == ["[   0:01] exploring"]
    lost = replace(start, elapsed=31.0, messages=("explorer-1 was lost",))
    assert lines.lines(lost) == ["[   0:31] explorer-1 was lost"]
    assert lines.lines(replace(lost, elapsed=60.9)) == []
    assert lines.lines(replace(lost, elapsed=61.0)) == ["[   1:01] exploring · explore 3/12"]


@pytest.mark.parametrize("stages", [{}, {"explore": (12, 12), "learn": (1, 1)}, {"explore": (0, 0)}])
def test_a_log_tells_nothing_of_stages_if_none_is_under_way(stages: dict[str, tuple[int, int]]) -> None:
    lines = PlainLines()
    start = Progress(run="r", state="learning", iteration=0, iterations=2, elapsed=1.0, stages=stages)
    assert lines.lines(start) == ["[   0:01] learning"]
    assert lines.lines(replace(start, elapsed=61.0)) == []


def test_a_log_of_a_resumed_run_begins_with_the_newest_of_what_was_made_before() -> None:
    lines = PlainLines()
    assert lines.lines(Progress(run="r", state="starting", iteration=0, iterations=20)) == ["[   0:00] starting"]
    before = replace(HALFWAY, state="starting workers", messages=(), remaining=None)
    assert lines.lines(before) == [
        "[   1:03] iteration 3/20: training reward 0.2800, Spearman 0.940",
        "[   1:03] held-out reward: after 5 0.251 ± 0.010",
        "[   1:03] starting workers",
    ]
    after = replace(before, train_rewards=(*before.train_rewards, 0.3, 0.4), remaining=2.0)
    assert lines.lines(after) == [
        "[   1:03] iteration 4/20: training reward 0.3000, about 0:02 left",
        "[   1:03] iteration 5/20: training reward 0.4000, about 0:02 left",
    ]


def test_messages_that_slide_out_of_the_window_are_not_told_again() -> None:
    lines = PlainLines()
    start = Progress(run="r", state="exploring", iteration=0, iterations=1, messages=("a", "b"))
    assert lines.lines(start) == ["[   0:00] a", "[   0:00] b", "[   0:00] exploring"]
    assert lines.lines(replace(start, messages=("b", "c"))) == ["[   0:00] c"]
    assert lines.lines(replace(start, messages=("b", "c"))) == []


def test_without_a_terminal_plain_lines_are_printed() -> None:
    output = io.StringIO()
    with LiveView(Console(file=output, width=20, force_terminal=False)) as view:
        view.update(HALFWAY)
        view.update(HALFWAY)
    text = output.getvalue()
    assert text.count("iteration 3/20: training reward 0.2800, Spearman 0.940") == 1
    assert "\x1b" not in text


def test_on_a_terminal_the_last_panel_stays() -> None:
    output = io.StringIO()
    with LiveView(Console(file=output, width=80, height=40, force_terminal=True, color_system=None)) as view:
        view.update(HALFWAY)
        view.update(replace(HALFWAY, state="done"))
    assert "done" in output.getvalue()
    assert "╭" in output.getvalue()


def test_plain_lines_can_be_asked_for_on_a_terminal() -> None:
    output = io.StringIO()
    with LiveView(Console(file=output, force_terminal=True), plain=True) as view:
        view.update(HALFWAY)
    assert "╭" not in output.getvalue()
    assert "exploring" in output.getvalue()
