"""Pictures of what was measured, from the numbers under results/: no GPU is needed to draw them again.

    python benchmarks/plots.py [--results FOLDER] [--images FOLDER]

Writes into docs/images those of docs/results.md. What was not measured yet is not drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page_shapes import NOISE_FILE, SIDES, shapes_of, side
from page_tables import read
from shape_results import SHAPES, SHARES, best_rate

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 7.5
"""Inches."""


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def plain(axes: Axes, title: str, x: str) -> None:
    axes.set_xlabel(x)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def fidelity(results: Path, images: Path) -> None:
    """Spearman of previews, by steps and by tier."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    content = read(results, "rank_fidelity_published.json")
    rows = [(row["tier"], row["steps"], row) for row in content["previews"]]
    tiers = list(dict.fromkeys(tier for tier, _, _ in rows))
    for place, tier in enumerate(tiers):
        mine = {steps: row for name, steps, row in rows if name == tier}
        x = np.array(sorted(mine)) + 0.12 * (place - len(tiers) / 2)  # beside one another
        mean, high = (np.array([mine[steps][key] for steps in sorted(mine)]) for key in ("spearman", "spearman_high"))
        axes.errorbar(x, mean, yerr=high - mean, label=tier, marker="o", markersize=4, capsize=2)
    axes.set_ylabel("Spearman")
    title = f"Testbed, {content['prompts']} prompts × {content['seeds']} seeds, 95 % over prompts"
    plain(axes, title, "steps of a preview")
    axes.legend(frameon=False, fontsize=8)
    save(figure, images / "results_fidelity.png")


def shapes(results: Path, images: Path) -> None:
    """Charged seconds to each share of the way, by samples of an optimiser step: a mark a shape, and each side's front.
    Shapes that were not there stand above. A line at a mark has all of its seeds; at a hollow one some were not there.
    """
    content = shapes_of(results)
    figure, panels = plt.subplots(1, len(SHARES), figsize=(1.6 * WIDTH, 4.0), layout="constrained", sharey=True)
    best = {(name, share): best_rate(content["runs"], name, share)[0] for name in content["rates"] for share in SHARES}
    above = 1.25 * max((took.mean for took in best.values() if took.there), default=1000.0)
    for axes, share in zip(panels, SHARES, strict=True):
        for two_stage, color, marker in ((True, "C0", "o"), (False, "C1", "s")):
            place = 1.06 if two_stage else 0.94  # beside one another
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
            axes.plot(ends, [front[x] for x in ends], color=color, label=f"{SIDES[two_stage]}, front")
        axes.axhline(0.89 * above, color="0.8", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xticks=[4, 8, 16, 32, 96, 288], yticks=[500, 1000, 2000, 4000])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        plain(axes, f"to {share:.0%} of the way", "samples of an optimiser step")
    panels[0].set_ylabel("charged s, FLUX.1-dev on an H200; ×: not there")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, images / "results_shapes.png")


def gradient_noise(results: Path, images: Path) -> None:
    """Signal over noise of a group's gradient against its price, with standard errors; a panel a policy. Along a dotted
    line a second of groups is worth the same.
    """
    content: dict[str, Any] = read(results, NOISE_FILE)
    policies = {  # without options
        policy: {name: row for name, row in of["rows"].items() if "+" not in name} for policy, of in content.items()
    }
    figure, panels = plt.subplots(1, len(policies), figsize=(1.3 * WIDTH, 3.8), layout="constrained", sharey=True)
    for axes, (policy, rows) in zip(np.atleast_1d(panels), policies.items(), strict=True):
        pools = dict.fromkeys(name.partition("of")[2] for name in rows if len(set(name.split("of"))) == 2)
        lines = {"no pool": [name for name in rows if len(set(name.split("of"))) == 1]}
        lines |= {
            f"pool of {pool}": [n for n in rows if n.partition("of")[2] == pool != n.partition("of")[0]]
            for pool in pools
        }
        for title, names in lines.items():
            x, y, error = ([rows[name][key] for name in names] for key in ("seconds", "ratio", "stderr"))
            axes.errorbar(x, y, error, label=title, marker="o", markersize=4, capsize=2)
            for name, *at in zip(names, x, y, strict=True):
                axes.annotate(name.partition("of")[0], at, textcoords="offset points", xytext=(4, 4), fontsize=8)
        seconds = np.array([min(row["seconds"] for row in rows.values()), max(row["seconds"] for row in rows.values())])
        for worth in (0.001, 0.002, 0.004, 0.008):
            axes.plot(seconds, worth * seconds, linestyle=":", color="0.7", linewidth=0.8, zorder=0)
        axes.set(xscale="log", yscale="log", xticks=[3, 5, 10, 20], yticks=[0.005, 0.01, 0.02, 0.05, 0.1])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        plain(axes, f"policy: {policy}", "charged s of a group, FLUX.1-dev on an H200")
    np.atleast_1d(panels)[0].set_ylabel("signal over noise, a group")
    np.atleast_1d(panels)[0].legend(frameon=False, fontsize=8)
    save(figure, images / "results_gradient_noise.png")


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
    if (results / NOISE_FILE).is_file():
        gradient_noise(results, images)


if __name__ == "__main__":
    main()
