"""Pictures of what was measured, from the numbers under results/: no GPU is needed to draw them again.

    python benchmarks/plots.py [--results FOLDER] [--images FOLDER]

Writes into docs/images those of docs/results.md. What was not measured yet is not drawn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from iteration import by_schedule
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from time_to_target import mean_with_interval, together, whole_runs
from variants import DIRECTS, TABLES, VARIANTS

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
NAMES = {"flux": "FLUX.1-dev", "sd3": "SD3.5-Large", "sana": "SANA 1.6B"}
BARS = ("released", "released two-stage", "fair", "ours, not pruned", "ours")
WIDTH = 7.5
"""Inches."""


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def plain(axes: Axes, title: str, x: str) -> None:
    axes.set_xlabel(x)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def iterations(results: Path, images: Path) -> None:
    """Seconds of one prompt's rollout and update by stage, in the schedules of `iteration.py`; a panel a model."""
    contents = {model: found for model in NAMES if (found := by_schedule(results, model))}
    figure, panels = plt.subplots(1, len(contents), figsize=(1.7 * WIDTH, 2.6), layout="constrained")
    for axes, (model, content) in zip(np.atleast_1d(panels), contents.items(), strict=True):
        total, left = content["total"], np.zeros(len(BARS))
        for stage in content["seconds"]["ours"]:
            widths = np.array([content["seconds"][name][stage] for name in BARS])
            axes.barh(BARS, widths, left=left, label=stage)
            left += widths
        for place, name in enumerate(BARS):
            axes.text(left[place], place, f" {total[name] / total['ours']:.2f} ×", va="center", fontsize=8)
        axes.set_xlim(0, 1.3 * left.max())
        axes.invert_yaxis()
        plain(axes, f"{NAMES[model]}, {content['gpu']}", "seconds")
    np.atleast_1d(panels)[0].legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, images / "results_iterations.png")


def fidelity(results: Path, images: Path) -> None:
    """Spearman of previews, by steps and by tier."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    content = read(results / "rank_fidelity_published.json")
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


def reward(results: Path, images: Path) -> None:
    """Held-out reward against charged GPU-hours, mean and 95 % interval over seeds: strategies, then other methods."""
    content = read(results / "convergence.json")
    runs = whole_runs(content)
    figure, panels = plt.subplots(1, 2, figsize=(1.5 * WIDTH, 4.2), layout="constrained", sharey=True)
    for name in (name for name in TABLES["convergence"] if name in runs):
        axes = panels[int(VARIANTS[name].method != next(iter(DIRECTS)))]
        steps, rewards = together(runs[name])
        mean, half = np.array([[m, h or 0.0] for m, h in map(mean_with_interval, rewards.T.tolist())]).T
        hours = np.array(steps) * content["charged"][name]["flux1_dev"] / 3600
        (line,) = axes.plot(hours, mean, label=f"{name} (n = {len(rewards)})")
        axes.fill_between(hours, mean - half, mean + half, alpha=0.2, color=line.get_color())
    for axes, title in zip(panels, ("DiffusionNFT", "other methods"), strict=True):
        plain(axes, title, "hours of one H200, charged as FLUX.1-dev")
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("held-out reward of the testbed")
    save(figure, images / "results_reward.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    results, images = arguments.results, arguments.images
    images.mkdir(parents=True, exist_ok=True)
    iterations(results, images)
    fidelity(results, images)
    if (results / "convergence.json").is_file():
        reward(results, images)


if __name__ == "__main__":
    main()
