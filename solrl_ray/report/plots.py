"""The report's plots: matplotlib figures made into inline SVG that follows the page's light or dark theme.

Colours are those of Okabe and Ito (2008), which colour-blind readers tell apart; markers differ too.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.report.summary import PairedGain
from solrl_ray.report.timing import OVERLAP, REST, SEGMENTS, WorkerTime, wall_segments

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "ink": "#1f2328",
    "muted": "#5b636c",
    "grid": "#dde2e7",
    "idle": "#e6eaee",
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "vermillion": "#d55e00",
    "purple": "#cc79a7",
    "sky": "#56b4e9",
    "grey": "#8a929b",
    "card": "#ffffff",
}
"""Theme variable of the page → its light value; plots are drawn with it, the page puts its own in place."""

SEGMENT_COLORS = {
    "explore": "sky",
    OVERLAP: "blue",
    "regenerate": "purple",
    "learn": "orange",
    "publish": "green",
    REST: "grey",
}
WIDE, NARROW = (5.4, 3.2), (3.7, 2.8)
"""Sizes of a plot that shares its line with one other or with two, inches; the page scales them."""


class Plot:
    """A figure on its way to inline SVG."""

    def __init__(self, size: tuple[float, float]) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=size, layout="constrained")
        self.axes: Axes = self.figure.subplots()
        self.svg = ""

    def labels(self, x: str, y: str) -> None:
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)

    def legend(self, columns: int) -> None:
        self.figure.legend(loc="outside upper left", ncols=columns, frameon=False, handlelength=1.6, borderpad=0.2)


@contextmanager
def drawing(name: str, title: str, size: tuple[float, float] = WIDE) -> Iterator[Plot]:
    """Opens a plot in the report's style; on leaving, `plot.svg` holds it as SVG."""
    import matplotlib

    with matplotlib.rc_context(_style()):
        plot = Plot(size)
        yield plot
        buffer = io.StringIO()
        plot.figure.savefig(buffer, format="svg", metadata={"Date": None})
        plot.svg = _inline(buffer.getvalue(), name, title)


def _style() -> Any:
    return {
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": "solrl",
        "text.color": COLORS["ink"],
        "axes.labelcolor": COLORS["muted"],
        "axes.edgecolor": COLORS["muted"],
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "grid.color": COLORS["grid"],
        "grid.linewidth": 0.7,
        "xtick.color": COLORS["muted"],
        "ytick.color": COLORS["muted"],
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "lines.linewidth": 1.7,
        "lines.markersize": 4,
        "legend.fontsize": 8.5,
        "savefig.transparent": True,
    }


def _inline(svg: str, name: str, title: str) -> str:
    """Makes matplotlib's SVG fit to stand in a page: no prolog, own ids, theme colours, no fixed size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    for variable, color in COLORS.items():
        svg = svg.replace(color, f"var(--{variable})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*pt"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _whole_ticks(axes: Axes, axis: str = "x") -> None:
    from matplotlib.ticker import MaxNLocator

    (axes.xaxis if axis == "x" else axes.yaxis).set_major_locator(
        MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10])
    )


def heldout_reward(evaluations: Sequence[EvaluationMetrics]) -> str:
    """Held-out reward over updates, with one standard error over prompts; real pictures as a level."""
    base = [record for record in evaluations if record.policy == "base"]
    trained = [record for record in evaluations if record.policy == "ema"]
    real = [record for record in evaluations if record.policy == "real"]
    curve = sorted({record.iteration: record for record in base + trained}.values(), key=lambda r: r.iteration)
    with drawing("heldout", "Held-out reward over updates") as plot:
        plot.labels("policy updates", "reward, held-out prompts")
        plot.axes.errorbar(
            [record.iteration for record in curve],
            [record.reward_mean for record in curve],
            yerr=[record.reward_stderr for record in curve],
            color=COLORS["blue"],
            marker="o",
            capsize=3,
            elinewidth=1.2,
            label="policy (± standard error over prompts)",
        )
        if real and curve:
            _real_level(plot.axes, real[-1].reward_mean, [record.reward_mean for record in curve])
        if curve:
            plot.axes.set_xlim(*_padded(0, max(1, curve[-1].iteration), 0.04))
        _whole_ticks(plot.axes)
        plot.legend(2)
    return plot.svg


def _real_level(axes: Axes, level: float, curve: Sequence[float]) -> None:
    """Draws the level of real pictures, or names it where drawing it would flatten the curve."""
    low, high = min(curve), max(curve)
    if level <= high + 2.5 * (high - low):
        axes.axhline(level, color=COLORS["green"], linestyle=(0, (4, 3)), linewidth=1.2, label="real pictures")
        return
    axes.margins(y=0.2)
    axes.text(
        0.99,
        0.98,
        f"real pictures: {level:.3f}, off the scale ↑",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=8.5,
        color=COLORS["green"],
    )


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    pad = (high - low) * share
    return low - pad, high + pad


def training_reward(iterations: Sequence[IterationMetrics], *, previews: bool) -> str:
    """Rewards measured in training: of the samples that are learned from, and of the whole pool as it was ranked."""
    numbers = [record.iteration for record in iterations]
    with drawing("training", "Training reward per iteration", NARROW) as plot:
        plot.labels("iteration", "reward, training prompts")
        plot.axes.plot(
            numbers,
            [record.reward_mean for record in iterations],
            color=COLORS["blue"],
            marker="o",
            label="regenerated seeds" if previews else "trained on",
        )
        plot.axes.plot(
            numbers,
            [record.proxy_reward_mean for record in iterations],
            color=COLORS["orange"],
            marker="s",
            linewidth=1.2,
            label="pool, by previews" if previews else "whole pool",
        )
        _whole_ticks(plot.axes)
        plot.legend(2)
    return plot.svg


def prompt_gains(gain: PairedGain) -> str:
    """What training changed for each held-out prompt, sorted; the mean with its standard error."""
    values = sorted(gain.differences.values())
    with drawing("gains", "Reward gain of each held-out prompt") as plot:
        plot.labels("held-out prompts, by gain", "final − base reward")
        colors = [COLORS["blue"] if value > 0 else COLORS["vermillion"] for value in values]
        plot.axes.bar(range(len(values)), values, width=0.8, color=colors)
        plot.axes.axhline(0, color=COLORS["muted"], linewidth=0.7)
        plot.axes.axhline(
            gain.mean,
            color=COLORS["ink"],
            linewidth=1.1,
            linestyle=(0, (4, 3)),
            label=f"mean {gain.mean:+.3f}",
        )
        plot.axes.set_xticks([])
        plot.axes.margins(x=0.02)
        plot.axes.spines["bottom"].set_visible(False)
        plot.legend(1)
    return plot.svg


def rank_fidelity(iterations: Sequence[IterationMetrics]) -> str:
    """Agreement of preview and full-precision rewards on the regenerated seeds."""
    numbers = [record.iteration for record in iterations]
    lines = (
        ("Spearman", [_or_nan(record.spearman) for record in iterations], "blue", "o"),
        ("Kendall", [_or_nan(record.kendall) for record in iterations], "orange", "s"),
        ("same half", [_or_nan(record.side_agreement) for record in iterations], "green", "^"),
    )
    lowest = min((value for _, values, _, _ in lines for value in values if math.isfinite(value)), default=0.0)
    with drawing("fidelity", "Rank fidelity per iteration") as plot:
        plot.labels("iteration", "correlation, share")
        for name, values, color, marker in lines:
            plot.axes.plot(numbers, values, color=COLORS[color], marker=marker, label=name)
        audited = _draw_audits(plot, iterations)
        plot.axes.set_ylim(min([0.5, lowest - 0.05, *audited]), max([1.01, *audited]))
        _whole_ticks(plot.axes)
        plot.legend(3)
    return plot.svg


def _draw_audits(plot: Plot, iterations: Sequence[IterationMetrics]) -> list[float]:
    """Estimates for whole pools with their intervals, which may leave [-1, 1]; returns the estimates."""
    audited = [record for record in iterations if record.audit]
    if not audited:
        return []
    means = [record.audit["spearman"] for record in audited]
    halves = [record.audit.get("spearman_high", mean) - mean for record, mean in zip(audited, means, strict=True)]
    numbers = [record.iteration for record in audited]
    plot.axes.errorbar(
        numbers, means, halves, color=COLORS["purple"], fmt="D", capsize=3, label="Spearman, whole pools"
    )
    return means


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def learning_signals(iterations: Sequence[IterationMetrics]) -> tuple[str, str]:
    """Distance from the reference policy, and size of the gradient."""
    numbers = [record.iteration for record in iterations]
    with drawing("kl", "Squared velocity distance to the reference policy", NARROW) as distance:
        distance.labels("iteration", "KL term, mean square")
        distance.axes.plot(numbers, [record.kl for record in iterations], color=COLORS["purple"], marker="o")
        _whole_ticks(distance.axes)
    with drawing("gradient", "Gradient norm per iteration", NARROW) as gradient:
        gradient.labels("iteration", "gradient norm")
        norms = [record.gradient_norm for record in iterations]
        gradient.axes.plot(numbers, norms, color=COLORS["vermillion"], marker="o")
        gradient.axes.set_ylim(bottom=0)
        _whole_ticks(gradient.axes)
    return distance.svg, gradient.svg


def stage_time(iterations: Sequence[IterationMetrics]) -> str:
    """Wall seconds of each iteration, stacked by stage."""
    numbers = [record.iteration for record in iterations]
    split = [wall_segments(record) for record in iterations]
    with drawing("stages", "Wall time of each iteration by stage") as plot:
        plot.labels("iteration", "wall time, s")
        bottom = [0.0] * len(split)
        for segment in SEGMENTS:
            heights = [parts[segment] for parts in split]
            color = COLORS[SEGMENT_COLORS[segment]]
            plot.axes.bar(numbers, heights, bottom=bottom, width=0.8, color=color, label=segment)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        plot.axes.margins(x=0.02, y=0.06)
        _whole_ticks(plot.axes)
        plot.legend(4)
    return plot.svg


def worker_time(times: Sequence[WorkerTime]) -> str:
    """Share of the workers' wall time that was work, one bar for each kind of worker."""
    names = [f"{time.role} ({time.workers})" for time in times]
    with drawing("workers", "Busy and idle time of workers") as plot:
        shares = [100 * time.busy_share for time in times]
        weights = [100 * time.weights_share for time in times]
        rest = [100 - share - waited for share, waited in zip(shares, weights, strict=True)]
        last = [100 - idle for idle in rest]
        plot.axes.barh(names, shares, height=0.5, color=COLORS["blue"], label="busy")
        plot.axes.barh(names, rest, left=last, height=0.5, color=COLORS["idle"], label="idle")
        plot.axes.barh(names, weights, left=shares, height=0.5, color=COLORS["orange"], label="waiting for weights")
        for row, share in enumerate(shares):
            inside = share > 80
            plot.axes.text(
                share + (-1.5 if inside else 1.5),
                row,
                f"{share:.0f} %",
                va="center",
                ha="right" if inside else "left",
                color=COLORS["card" if inside else "ink"],
            )
        plot.axes.set_xlim(0, 100)
        plot.axes.grid(False)
        plot.axes.invert_yaxis()
        plot.axes.spines["left"].set_visible(False)
        plot.axes.set_xlabel("share of wall time × workers, %")
        plot.legend(2)
    return plot.svg
