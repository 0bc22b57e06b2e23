"""Draw the figures of docs/results from the numbers under results/, without a GPU.

    python benchmarks/plots.py [--results FOLDER] [--images FOLDER]

Skips figures without results.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page_shapes import shapes_of, side
from page_tables import read
from shape_results import SHAPES, SHARES, best_rate

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 7.5
"""Width of a figure, in inches."""


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def plain(axes: Axes, title: str, x: str) -> None:
    axes.set_xlabel(x)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def fidelity(results: Path, images: Path) -> None:
    """Plot the Spearman correlation of previews, by steps and tier."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    content = read(results, "rank_fidelity_published.json")
    rows = [(row["tier"], row["steps"], row) for row in content["previews"]]
    tiers = list(dict.fromkeys(tier for tier, _, _ in rows))
    for place, tier in enumerate(tiers):
        mine = {steps: row for name, steps, row in rows if name == tier}
        x = np.array(sorted(mine)) + 0.12 * (place - len(tiers) / 2)  # next to each other
        mean, high = (np.array([mine[steps][key] for steps in sorted(mine)]) for key in ("spearman", "spearman_high"))
        axes.errorbar(x, mean, yerr=high - mean, label=tier, marker="o", markersize=4, capsize=2)
    axes.set_ylabel("Spearman with full-precision\nrewards of the same seeds")
    title = f"Testbed, {content['prompts']} prompts × {content['seeds']} seeds; bars: 95 % interval over prompts"
    plain(axes, title, "solver steps per preview")
    axes.legend(frameon=False, fontsize=8, title="preview precision", title_fontsize=8)
    save(figure, images / "results_fidelity.png")


def shapes(results: Path, images: Path) -> None:
    """Plot the simulated GPU time to close each share of the gap, by samples per optimiser step: one marker per setting
    and the Pareto front of each side. A bar spans all seeds; settings that never closed the share are above the line.
    """
    content = shapes_of(results)
    figure, panels = plt.subplots(1, len(SHARES), figsize=(1.6 * WIDTH, 4.4), layout="constrained", sharey=True)
    best = {(name, share): best_rate(content["runs"], name, share)[0] for name in content["rates"] for share in SHARES}
    above = 1.25 * max((took.mean for took in best.values() if took.there), default=1000.0)
    for axes, share in zip(panels, SHARES, strict=True):
        for two_stage, color, marker in ((True, "C0", "o"), (False, "C1", "s")):
            place = 1.06 if two_stage else 0.94  # next to each other
            front: dict[float, float] = {}
            for name in side(content, two_stage):
                x, took = place * SHAPES[name].prompts * SHAPES[name].chosen, best[name, share]
                if not took.there:
                    axes.plot(x, above, "x", color=color, alpha=0.3, markersize=4)
                    continue
                around = [[took.mean - min(took.seconds)], [max(took.seconds) - took.mean]]
                fill = color if took.complete else "none"
                axes.errorbar(
                    x, took.mean, around, fmt=marker, color=color, markerfacecolor=fill, alpha=0.6, markersize=5
                )
                front[x] = min(took.mean, front.get(x, took.mean))
            ends = sorted(front)
            axes.plot(ends, [front[x] for x in ends], color=color)
        axes.axhline(0.89 * above, color="0.8", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xticks=[2, 4, 8, 16, 32, 96, 288], yticks=[500, 1000, 2000, 4000])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        plain(axes, f"Time to close {share:.0%} of the gap", "samples per optimiser step")
    panels[0].set_ylabel("simulated GPU time, s\n(FLUX.1-dev on one H200)")
    legend = [
        ("o-", "C0", "C0", "two stages (line: fastest)"),
        ("s-", "C1", "C1", "one stage (line: fastest)"),
        ("o", "0.5", "none", "hollow: not all seeds reached it"),
        ("x", "0.5", "0.5", "no seed reached it"),
    ]
    for marker, color, filled, label in legend:
        panels[-1].plot([], [], marker, color=color, markerfacecolor=filled, label=label)
    panels[-1].legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, images / "results_shapes.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    results, images = arguments.results, arguments.images
    images.mkdir(parents=True, exist_ok=True)
    fidelity(results, images)
    if shapes_of(results):
        shapes(results, images)


if __name__ == "__main__":
    main()
