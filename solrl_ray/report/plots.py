"""The report's plots: matplotlib figures as inline SVG that follows the page's light or dark theme.

Colours are those of Okabe and Ito (2008), which colour-blind readers can distinguish; markers differ too.
"""

from __future__ import annotations

import functools
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from solrl_ray.evaluation.paired_gain import PairedGain
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.report.curve import Curve, Point
from solrl_ray.report.tables import SEGMENTS, wall_segments

if TYPE_CHECKING:
    from matplotlib.axes import Axes

P = ParamSpec("P")

COLORS = {
    "ink": "#1f2328",
    "muted": "#5b636c",
    "grid": "#dde2e7",
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "vermillion": "#d55e00",
    "purple": "#cc79a7",
    "sky": "#56b4e9",
    "grey": "#8a929b",
}
"""Theme variable of the page → its light value; plots are drawn with it, and the page replaces it."""

SEGMENT_COLORS = ("sky", "blue", "purple", "orange", "green", "grey")
"""Colours of `SEGMENTS`."""
WIDE, NARROW = (5.4, 3.2), (3.7, 2.8)
"""Sizes of a plot beside one other or two others, inches; the page scales them."""
DASHED = (0, (4, 3))
SVG_DPI = 72
"""Matplotlib's resolution of SVG."""

STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "solrl",
    "text.parse_math": False,  # a run's name may have dollars
    "text.color": COLORS["ink"],
    "axes.labelcolor": COLORS["muted"],
    "axes.edgecolor": COLORS["muted"],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
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


def _plot(
    name: str, title: str, x: str, y: str, *, size: tuple[float, float] = WIDE, columns: int = 0
) -> Callable[[Callable[Concatenate[Axes, P], None]], Callable[P, str]]:
    """Turns a function that draws into axes into one that returns the plot as SVG, in the report's style.

    Args:
        name: prefix of the ids inside the SVG.
        x, y: names of the axes; an axis that counts has whole-number ticks.
        columns: of the legend above; 0: no legend.
    """

    def decorated(draw: Callable[Concatenate[Axes, P], None]) -> Callable[P, str]:
        @functools.wraps(draw)
        def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
            # Importing matplotlib would read it; a notebook's names a backend that this process may not have.
            os.environ["MPLBACKEND"] = "svg"
            import matplotlib
            from matplotlib.backends.backend_svg import FigureCanvasSVG
            from matplotlib.figure import Figure
            from matplotlib.layout_engine import ConstrainedLayoutEngine
            from matplotlib.ticker import MaxNLocator

            with matplotlib.rc_context(STYLE):
                figure = Figure(figsize=size, dpi=SVG_DPI)
                FigureCanvasSVG(figure)  # its text metrics are used for the layout
                axes = figure.subplots()
                axes.set_xlabel(x)
                axes.set_ylabel(y)
                if x in ("iteration", "policy updates"):
                    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
                draw(axes, *args, **kwargs)
                if columns:
                    place = "outside upper left"
                    figure.legend(loc=place, ncols=columns, frameon=False, handlelength=1.6, borderpad=0.2)
                ConstrainedLayoutEngine().execute(figure)  # as the figure's own engine, it would draw everything twice
                buffer = io.StringIO()
                figure.savefig(buffer, format="svg", metadata={"Date": None})
            return _inline(buffer.getvalue(), name, title)

        return drawn

    return decorated


def _inline(svg: str, name: str, title: str) -> str:
    """Makes matplotlib's SVG fit for a page: no prolog, own ids, theme colours, no fixed size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", svg)
    for variable, color in COLORS.items():
        svg = svg.replace(color, f"var(--{variable})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*pt"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _line(
    axes: Axes, records: Iterable[IterationMetrics], field: str, color: str, marker: str = "o", **style: Any
) -> None:
    """A metric over the iterations, with gaps where it is None; `style` as for `Axes.plot`."""
    points = [(record.iteration, getattr(record, field)) for record in records]
    values = [math.nan if value is None else value for _, value in points]
    axes.plot([number for number, _ in points], values, color=COLORS[color], marker=marker, **style)


@_plot("heldout", "Held-out reward over updates", "policy updates", "reward, held-out prompts", columns=2)
def heldout_reward(axes: Axes, curve: Curve, real: float | None) -> None:
    """Held-out reward over updates, with one standard error over prompts; real pictures as a level."""
    rewards, updates = [point.reward for point in curve.points], [point.updates for point in curve.points]
    axes.errorbar(
        updates,
        rewards,
        yerr=[point.stderr for point in curve.points],
        color=COLORS["blue"],
        marker="o",
        capsize=3,
        elinewidth=1.2,
        label="policy (± standard error over prompts)",
    )
    last = max(1, updates[-1])
    axes.set_xlim(-0.04 * last, 1.04 * last)
    if real is not None:
        _real_level(axes, real, min(rewards), max(rewards))


def _real_level(axes: Axes, level: float, low: float, high: float) -> None:
    """Draws the level of real pictures, or only names it if drawing it would flatten the curve from `low` to `high`."""
    if level <= high + 2.5 * (high - low):
        axes.axhline(level, color=COLORS["green"], linestyle=DASHED, linewidth=1.2, label="real pictures")
        return
    axes.margins(y=0.2)
    text, color = f"real pictures: {level:.3f}, off the scale ↑", COLORS["green"]
    axes.text(0.99, 0.98, text, transform=axes.transAxes, ha="right", va="top", fontsize=8.5, color=color)


@_plot("updates", "Held-out reward of runs over updates", "policy updates", "reward, held-out prompts", columns=2)
def rewards_over_updates(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """Held-out reward of several runs."""
    _curves(axes, curves, lambda curve, point: point.updates)


def rewards_over_time(curves: Mapping[str, Curve]) -> str:
    """The same over the time of their iterations; times their GPUs, if all have some."""
    gpus = all(curve.gpus for curve in curves.values())
    x = "GPU-hours" if gpus else "hours of iterations"
    draw = _plot("hours", "Held-out reward of runs over time", x, "reward, held-out prompts", columns=2)(_curves)
    return draw(curves, lambda curve, point: (curve.gpus if gpus else 1) * point.seconds / 3600)


def _curves(axes: Axes, curves: Mapping[str, Curve], place: Callable[[Curve, Point], float]) -> None:
    """Each run's rewards over the x values by `place`, with a band of one standard error over prompts."""
    colors = [COLORS[name] for name in ("blue", "orange", "green", "vermillion", "purple", "sky", "grey")]
    for number, (name, curve) in enumerate(curves.items()):
        color, marker = colors[number % len(colors)], "os^Dvx"[number % 6]
        places = [place(curve, point) for point in curve.points]
        low, high = ([p.reward + sign * p.stderr for p in curve.points] for sign in (-1, 1))
        shown = f" {name}" if name.startswith("_") else name  # which would be in no legend
        axes.plot(places, [point.reward for point in curve.points], color=color, marker=marker, label=shown)
        axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)


@_plot("training", "Training reward per iteration", "iteration", "reward, training prompts", size=NARROW, columns=2)
def training_reward(axes: Axes, iterations: Sequence[IterationMetrics], *, previews: bool) -> None:
    """Rewards measured in training: of the samples learned from, and of the whole pool as ranked."""
    trained, pool = ("regenerated seeds", "pool, by previews") if previews else ("trained on", "whole pool")
    _line(axes, iterations, "reward_mean", "blue", label=trained)
    numbers, means = [record.iteration for record in iterations], [record.reward_mean for record in iterations]
    errors = [record.reward_std / math.sqrt(max(1, record.samples)) for record in iterations]
    axes.errorbar(numbers, means, yerr=errors, linestyle="none", color=COLORS["blue"], elinewidth=0.9, capsize=2)
    _line(axes, iterations, "proxy_reward_mean", "orange", "s", label=pool, linewidth=1.2)


@_plot("gains", "Reward gain of each held-out prompt", "held-out prompts, by gain", "final − base reward", columns=1)
def prompt_gains(axes: Axes, gain: PairedGain) -> None:
    """The change by training for each held-out prompt, sorted; the mean with its standard error."""
    values = sorted(gain.differences.values())
    colors = [COLORS["blue"] if value > 0 else COLORS["vermillion"] for value in values]
    axes.bar(range(len(values)), values, width=0.8, color=colors)
    axes.axhline(0, color=COLORS["muted"], linewidth=0.7)
    axes.axhline(gain.mean, color=COLORS["ink"], linewidth=1.1, linestyle=DASHED, label=f"mean {gain.mean:+.3f}")
    axes.set_xticks([])
    axes.margins(x=0.02)
    axes.spines["bottom"].set_visible(False)


@_plot("fidelity", "Rank fidelity per iteration", "iteration", "correlation, share", columns=3)
def rank_fidelity(axes: Axes, iterations: Sequence[IterationMetrics]) -> None:
    """Agreement of preview and full-precision rewards on regenerated seeds."""
    _line(axes, iterations, "spearman", "blue", label="Spearman")
    _line(axes, iterations, "kendall", "orange", "s", label="Kendall")
    _line(axes, iterations, "side_agreement", "green", "^", label="same half")
    measured = [value for r in iterations for value in (r.spearman, r.kendall, r.side_agreement) if value is not None]
    lowest = min(filter(math.isfinite, measured), default=0.0)
    axes.set_ylim(min(0.5, lowest - 0.05), 1.01)


@_plot("kl", "Squared velocity distance to the reference policy", "iteration", "KL term, mean square", size=NARROW)
def reference_distance(axes: Axes, iterations: Sequence[IterationMetrics]) -> None:
    _line(axes, iterations, "kl", "purple")


@_plot("loss", "Loss per iteration", "iteration", "loss", size=NARROW, columns=2)
def loss(axes: Axes, iterations: Sequence[IterationMetrics]) -> None:
    """The learner's loss, and the policy's part of it."""
    _line(axes, iterations, "loss", "blue", label="all")
    _line(axes, iterations, "policy_loss", "orange", "s", label="policy", linewidth=1.2)


@_plot("gradient", "Gradient norm per iteration", "iteration", "gradient norm", size=NARROW)
def gradient_norm(axes: Axes, iterations: Sequence[IterationMetrics]) -> None:
    _line(axes, iterations, "gradient_norm", "vermillion")
    axes.set_ylim(bottom=0)


@_plot("stages", "Wall time of each iteration by stage", "iteration", "wall time, s", columns=4)
def stage_time(axes: Axes, iterations: Sequence[IterationMetrics]) -> None:
    """Wall seconds of each iteration, stacked by stage."""
    numbers = [record.iteration for record in iterations]
    split = [wall_segments(record) for record in iterations]
    bottom = [0.0] * len(split)
    for segment, color in zip(SEGMENTS, SEGMENT_COLORS, strict=True):
        heights = [parts[segment] for parts in split]
        axes.bar(numbers, heights, bottom=bottom, width=0.8, color=COLORS[color], label=segment)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.margins(x=0.02, y=0.06)
