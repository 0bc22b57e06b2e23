"""Live view of a run: a panel that refreshes on a terminal, plain lines elsewhere (logs, pipes)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from solrl_ray.common import output
from solrl_ray.config.problems import counted
from solrl_ray.metrics.records import EVENTS_SHOWN, Event, Progress

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 30
"""Number of newest iterations in a sparkline; fits a terminal with 80 columns."""
WORKERS_SHOWN = 8
NOTES_SHOWN = 4
QUIET_SECONDS = 30.0
"""Seconds without a log line, after which a line reports the progress of the stages and of starting actors."""


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Draw the newest `width` values as one character each, scaled from their minimum to their maximum.

    Values that are not finite become a space; if all values are equal, the bars have half height.
    """
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        share = (value - low) / (high - low) if high > low else 0.5
        return BARS[min(int(share * len(BARS)), len(BARS) - 1)]

    return "".join(map(bar, shown))


def duration(seconds: float) -> str:
    """Format seconds as ``m:ss`` or ``h:mm:ss``; ``-:--`` if negative or not finite."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-:--"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"


def render(progress: Progress, *, since_update: float = 0.0) -> RenderableType:
    """The panel for a snapshot taken `since_update` seconds ago; its clocks are advanced by that time."""
    elapsed = duration(progress.elapsed + since_update)
    blocks: list[RenderableType] = [_headline(progress, since_update), Text(), _stages(progress)]
    numbers = _numbers(progress)
    if numbers.row_count:
        blocks += [Text(), numbers]
    if progress.alarm:
        blocks += [Text(), Text(f"warning: {progress.alarm}", style="bold red")]
    if progress.workers or progress.notes:
        blocks += [Text(), _workers(progress)]
    if progress.events:
        blocks += [Text(), *(Text(_dated(event), style="yellow") for event in progress.events[-EVENTS_SHOWN:])]
    return Panel(
        Group(*blocks),
        title=f"[bold]{escape(progress.run)}[/]",
        subtitle=f"elapsed {elapsed}",
        title_align="left",
        subtitle_align="right",
        border_style="cyan",
        padding=(0, 1),
    )


def _dated(event: Event) -> str:
    """``29 Nov 10:45  explorer-1 was lost``, in local time."""
    return f"{datetime.fromisoformat(event.time).astimezone():%d %b %H:%M}  {event.what}"


def _headline(progress: Progress, since_update: float) -> Text:
    shown = min(progress.iteration + 1, progress.iterations)
    line = Text.assemble((f"iteration {shown} of {progress.iterations}", "bold"), "   ", (progress.state, "cyan"))
    if progress.remaining is not None and progress.state != "done":  # the estimate is rarely exactly 0 at the end
        line.append(f"   about {duration(max(0.0, progress.remaining - since_update))} left")
    return line


def _stages(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(width=30)
    table.add_column(no_wrap=True, justify="right")
    for stage, (done, total) in progress.stages.items():
        finished = total > 0 and done >= total
        length = max(total, 1)
        bar = ProgressBar(total=length, completed=min(done, length), width=30, complete_style="cyan")
        table.add_row(Text(stage, style="green" if finished else ""), bar, f"{done}/{total}")
    return table


def _numbers(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(style="magenta", overflow="crop", no_wrap=True)
    for _, policy, mean, stderr in progress.heldout:
        if policy in ("base", "real"):
            table.add_row(f"held-out, {policy}", f"{mean:.3f} ± {stderr:.3f}", "")
    trained = [entry for entry in progress.heldout if entry[1] not in ("base", "real")]
    if trained:
        updates, _, mean, stderr = trained[-1]
        curve = [entry[2] for entry in progress.heldout if entry[1] != "real"]
        when = "1 update" if updates == 1 else f"{updates} updates"
        table.add_row(f"held-out, {when}", f"{mean:.3f} ± {stderr:.3f}", sparkline(curve))
    if progress.train_rewards:
        first, last = progress.train_rewards[0], progress.train_rewards[-1]
        table.add_row("training reward", f"{first:.3f} → {last:.3f}", sparkline(progress.train_rewards))
    if progress.spearman:
        table.add_row("rank fidelity", f"Spearman {progress.spearman[-1]:.3f}", sparkline(progress.spearman))
    return table


def _workers(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True, overflow="ellipsis")
    others = {name: state for name, state in progress.workers.items() if name not in progress.notes}
    workers = [
        *sorted(progress.notes.items()),
        *sorted(others.items()),
    ]  # first the workers that the run may be waiting for
    for name, state in workers[:WORKERS_SHOWN]:
        table.add_row(Text(name), Text(state))
    if len(workers) > WORKERS_SHOWN:
        table.add_row(Text(f"and {len(workers) - WORKERS_SHOWN} more"), Text())
    return table


class PlainLines:
    """Turns snapshots of a run into log lines.

    Each event, new state, evaluation and finished iteration becomes one line. In quiet periods, a line reports the
    progress every `QUIET_SECONDS` if it has changed. Each snapshot must have the events since the previous one.
    """

    def __init__(self) -> None:
        self._states: set[str] = set()
        self._iterations = 0
        self._evaluations = 0
        self._between = ""
        self._logged_at = 0.0

    def lines(self, progress: Progress) -> list[str]:
        """Log lines for the news since the previous snapshot. Each state is logged only the first time.

        After a resume, only the latest earlier iteration and evaluation are logged.
        """
        finished = len(progress.train_rewards)
        if progress.remaining is None and finished > self._iterations:  # no pace yet: they are from before a resume
            self._iterations = finished - 1
            self._evaluations = max(self._evaluations, len(progress.heldout) - 1)
        news = list(progress.messages)
        for number in range(self._iterations, len(progress.train_rewards)):
            news.append(self._iteration(progress, number))
        self._iterations = max(self._iterations, len(progress.train_rewards))
        for updates, policy, mean, stderr in progress.heldout[self._evaluations :]:
            names = {"base": "of the base model", "real": "of real images"}
            name = names.get(policy, f"after {counted(updates, 'update')}")
            news.append(f"held-out reward {name}: {mean:.3f} ± {stderr:.3f}")
        self._evaluations = max(self._evaluations, len(progress.heldout))
        if progress.state not in self._states:
            self._states.add(progress.state)
            news.append(progress.state)
        between = _between(progress)
        if not news and between != self._between and progress.elapsed - self._logged_at >= QUIET_SECONDS:
            self._between = between
            news += [between] if between else []
        if news:
            self._logged_at = progress.elapsed
        return [f"[{duration(progress.elapsed):>7}] {line}" for line in news]

    def _iteration(self, progress: Progress, number: int) -> str:
        reward = progress.train_rewards[number]
        line = f"iteration {number + 1}/{progress.iterations}: training reward {reward:.4f}"
        if number < len(progress.spearman):
            line += f", Spearman {progress.spearman[number]:.3f}"
        if progress.remaining is not None:
            line += f", about {duration(progress.remaining)} left"
        return line


def _between(progress: Progress) -> str:
    """Progress line, ``exploring · explore 3/12 · regenerate 1/12``; empty if no stage is running and no actor
    starting.
    """
    under_way = [f"{stage} {done}/{total}" for stage, (done, total) in progress.stages.items() if done < total]
    under_way += [_notes(progress.notes)] if progress.notes else []
    return " · ".join([progress.state, *under_way]) if under_way else ""


def _notes(notes: Mapping[str, str]) -> str:
    """Notes with actors grouped: ``learner-0: loading transformer; explorer-0 and 7 more: loading the reward
    clipscore``.
    """
    by_note: dict[str, list[str]] = {}
    for name, words in sorted(notes.items()):
        by_note.setdefault(words, []).append(name)
    lines = [
        f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {words}" for words, names in by_note.items()
    ]
    hidden = len(lines) - NOTES_SHOWN
    return "; ".join([*lines[:NOTES_SHOWN], *([f"and {hidden} others"] * (hidden > 0))])


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Drop further output, so that the run continues when the reader of its output has gone."""
        output.drop()


class LiveView:
    """Shows snapshots of a live run.

    On a terminal, one panel is redrawn in place, and its last state stays. Elsewhere, each event is one plain line.
    Other text that is printed while the view is open appears above the panel.

    >>> with LiveView() as view:  # doctest: +SKIP
    ...     view.update(progress)
    """

    def __init__(self, console: Console | None = None, *, plain: bool = False) -> None:
        """`plain`: print lines on a terminal too."""
        self._console = console or _Console()
        self._plain = PlainLines()
        self._progress: Progress | None = None
        self._events: tuple[Event, ...] = ()
        """The newest events, for the panel."""
        self.seen = 0
        """Number of events shown so far; the next snapshot should have the events from this number on."""
        self._updated = time.monotonic()
        live = Live(console=self._console, get_renderable=self._current, vertical_overflow="ellipsis")
        self._live = live if self._console.is_terminal and not plain else None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *ended: object) -> None:
        if self._live is not None:
            with output.lost_if_refused():  # for example, the terminal was closed
                self._live.stop()

    def update(self, progress: Progress) -> None:
        """Show a new snapshot, whose events begin with number `seen`. Cheap: may be called many times per second."""
        self.seen += len(progress.events)
        self._events = (*self._events, *progress.events)[-EVENTS_SHOWN:]
        self._progress, self._updated = replace(progress, events=self._events), time.monotonic()
        if self._live is None:
            for line in self._plain.lines(progress):
                with output.lost_if_refused():
                    self._console.print(Text(line), soft_wrap=True)

    def _current(self) -> RenderableType:
        if self._progress is None:
            return Text("starting …")
        return render(self._progress, since_update=time.monotonic() - self._updated)
