"""Plots of the report: matplotlib figures as SVG, in matplotlib's colours for colour-blind readers, with distinct
markers.
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
"""Size of a plot in inches; the page scales it."""
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "solrl",
    "text.parse_math": False,  # the name of a run may contain dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.4,
    "lines.markersize": 4,
}


def _plot(x: str, y: str, *, columns: int) -> Callable[[Callable[Concatenate[Axes, P], None]], Callable[P, str]]:
    """Turn a function that draws into axes into a function that returns the plot as SVG, in the report's style.

    Args:
        x, y: labels of the axes; iterations and updates have whole-number ticks.
        columns: columns of the legend, which is above the plot.
    """

    def decorated(draw: Callable[Concatenate[Axes, P], None]) -> Callable[P, str]:
        @functools.wraps(draw)
        def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
            # Importing matplotlib reads this variable; a notebook may set a backend that is not installed here.
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
    """Plot a metric over the iterations, with gaps where it is None; `style` is passed to `Axes.plot`."""
    points = [(record.iteration, getattr(record, field)) for record in records]
    values = [math.nan if value is None else value for _, value in points]
    axes.plot([number for number, _ in points], values, marker=marker, **style)


@_plot("policy updates", "held-out reward", columns=2)
def heldout_reward(axes: Axes, curve: Curve, real: float | None) -> None:
    """Held-out reward over policy updates, ± one standard error over prompts; the legend has the real images' mean."""
    rewards, updates = [point.reward for point in curve.points], [point.updates for point in curve.points]
    errors, label = [point.stderr for point in curve.points], "trained policy"
    axes.errorbar(updates, rewards, yerr=errors, marker="o", capsize=3, label=label)
    if real is not None:
        axes.plot([], [], linestyle="none", label=f"real images: {real:.3f}")


@_plot("iteration", "training reward", columns=2)
def training_reward(axes: Axes, iterations: Sequence[IterationMetrics], *, previews: bool) -> None:
    """Mean reward of the samples trained on (with standard error), and mean reward of the whole pool, as ranked."""
    trained = "samples trained on"
    pool = "previews of the whole pool" if previews else "all samples of the pool"
    numbers, means = [record.iteration for record in iterations], [record.reward_mean for record in iterations]
    errors = [record.reward_std / math.sqrt(max(1, record.samples)) for record in iterations]
    axes.errorbar(numbers, means, yerr=errors, marker="o", capsize=2, label=trained)
    _line(axes, iterations, "proxy_reward_mean", "s", label=pool)


@_plot("held-out prompts, sorted by gain", "reward after − before training", columns=1)
def prompt_gains(axes: Axes, gain: PairedGain) -> None:
    """Gain of each held-out prompt, sorted, as bars; the mean gain as a dashed line."""
    values = sorted(gain.differences.values())
    axes.bar(range(len(values)), values, color=["C0" if value > 0 else "C1" for value in values])
    axes.axhline(gain.mean, color="black", linestyle="--", label=f"mean gain: {gain.mean:+.3f}")
    axes.set_xticks([])


@_plot("iteration", "agreement (correlation or share)", columns=3)
def rank_fidelity(axes: Axes, iterations: Sequence[IterationMetrics]) -> None:
    """Agreement of preview and full-precision rewards on the regenerated seeds: two correlations and a share."""
    _line(axes, iterations, "spearman", label="Spearman correlation")
    _line(axes, iterations, "kendall", "s", label="Kendall's tau")
    _line(axes, iterations, "side_agreement", "^", label="same half (share)")


@_plot("iteration", "loss", columns=2)
def loss(axes: Axes, iterations: Sequence[IterationMetrics]) -> None:
    """Total loss of the update, and the part from the policy objective."""
    _line(axes, iterations, "loss", label="total")
    _line(axes, iterations, "policy_loss", "s", label="policy objective")
