"""The report's plots: matplotlib figures as SVG.

Colours are those of matplotlib's style for colour-blind readers; markers differ too.
"""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from solrl_ray.evaluation.paired_gain import PairedGain
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.report.curve import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

P = ParamSpec("P")

SIZE = (5.4, 3.2)
"""Of a plot, inches; the page scales it."""
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "solrl",
    "text.parse_math": False,  # a run's name may have dollars
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.4,
    "lines.markersize": 4,
}


def _plot(x: str, y: str, *, columns: int) -> Callable[[Callable[Concatenate[Axes, P], None]], Callable[P, str]]:
    """Turns a function that draws into axes into one that returns the plot as SVG, in the report's style.

    Args:
        x, y: names of the axes; an axis that counts has whole-number ticks.
        columns: of the legend above.
    """

    def decorated(draw: Callable[Concatenate[Axes, P], None]) -> Callable[P, str]:
        @functools.wraps(draw)
        def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
            # Importing matplotlib would read it; a notebook's names a backend that this process may not have.
            os.environ["MPLBACKEND"] = "svg"
            import matplotlib.style
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator

            with matplotlib.style.context(["tableau-colorblind10", STYLE]):
                figure = Figure(figsize=SIZE, layout="constrained")
                axes = figure.subplots()
                axes.set_xlabel(x)
                axes.set_ylabel(y)
                if x in ("iteration", "policy updates"):
                    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                draw(axes, *args, **kwargs)
                figure.legend(loc="outside upper left", ncols=columns, frameon=False)
                buffer = io.StringIO()
                figure.savefig(buffer, format="svg", metadata={"Date": None})
            return buffer.getvalue()

        return drawn

    return decorated


def _line(axes: Axes, records: Iterable[IterationMetrics], field: str, marker: str = "o", **style: Any) -> None:
    """A metric over the iterations, with gaps where it is None; `style` as for `Axes.plot`."""
    points = [(record.iteration, getattr(record, field)) for record in records]
    values = [math.nan if value is None else value for _, value in points]
    axes.plot([number for number, _ in points], values, marker=marker, **style)


@_plot("policy updates", "reward, held-out prompts", columns=2)
def heldout_reward(axes: Axes, curve: Curve, real: float | None) -> None:
    """Held-out reward over updates, with one standard error over prompts; the legend has the level of real pictures."""
    rewards, updates = [point.reward for point in curve.points], [point.updates for point in curve.points]
    errors, label = [point.stderr for point in curve.points], "policy (± standard error over prompts)"
    axes.errorbar(updates, rewards, yerr=errors, marker="o", capsize=3, label=label)
    if real is not None:
        axes.plot([], [], linestyle="none", label=f"real pictures: {real:.3f}")


@_plot("iteration", "reward, training prompts", columns=2)
def training_reward(axes: Axes, iterations: Sequence[IterationMetrics], *, previews: bool) -> None:
    """Rewards measured in training: of the samples learned from, and of the whole pool as ranked."""
    trained, pool = ("regenerated seeds", "pool, by previews") if previews else ("trained on", "whole pool")
    numbers, means = [record.iteration for record in iterations], [record.reward_mean for record in iterations]
    errors = [record.reward_std / math.sqrt(max(1, record.samples)) for record in iterations]
    axes.errorbar(numbers, means, yerr=errors, marker="o", capsize=2, label=trained)
    _line(axes, iterations, "proxy_reward_mean", "s", label=pool)


@_plot("held-out prompts, by gain", "final − base reward", columns=1)
def prompt_gains(axes: Axes, gain: PairedGain) -> None:
    """The change by training for each held-out prompt, sorted; the mean with its standard error."""
    values = sorted(gain.differences.values())
    axes.bar(range(len(values)), values, color=["C0" if value > 0 else "C1" for value in values])
    axes.axhline(gain.mean, color="black", linestyle="--", label=f"mean {gain.mean:+.3f}")
    axes.set_xticks([])


@_plot("iteration", "correlation, share", columns=3)
def rank_fidelity(axes: Axes, iterations: Sequence[IterationMetrics]) -> None:
    """Agreement of preview and full-precision rewards on regenerated seeds."""
    _line(axes, iterations, "spearman", label="Spearman")
    _line(axes, iterations, "kendall", "s", label="Kendall")
    _line(axes, iterations, "side_agreement", "^", label="same half")


@_plot("iteration", "loss", columns=2)
def loss(axes: Axes, iterations: Sequence[IterationMetrics]) -> None:
    """The learner's loss, and the policy's part of it."""
    _line(axes, iterations, "loss", label="all")
    _line(axes, iterations, "policy_loss", "s", label="policy")
