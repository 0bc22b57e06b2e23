"""Pictures of what was measured, from the numbers under results/: no GPU is needed to draw them again.

    python benchmarks/plots.py [--results FOLDER] [--images FOLDER]

Writes docs/images/ those of docs/results.md and docs/reference/objectives.md. What was not measured yet is not drawn.
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
import objectives
from iteration import by_schedule
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from page_speed import PARTS as STAGES
from page_speed import SCHEDULES, whole_iterations
from page_tables import PUBLISHED
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


def finish(figure: Figure, axes: Axes, title: str, unit: str, path: Path) -> None:
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def stacked(axes: Axes, rows: list[tuple[str, dict[str, float], str]], *, legend: str = "center right") -> None:
    """One bar a row: its name, seconds by what they are spent on, and what is said behind it. `legend`: its place."""
    parts = list(dict.fromkeys(part for _, seconds, _ in rows for part in seconds))
    for place, (_, seconds, said) in enumerate(rows):
        left = 0.0
        for part, width in seconds.items():
            axes.barh(place, width, left=left, color=f"C{parts.index(part)}")
            left += width
        axes.text(left, place, said, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xlim(0, 1.3 * max(sum(seconds.values()) for _, seconds, _ in rows))
    keys = [plt.Rectangle((0, 0), 1, 1, color=f"C{number}") for number in range(len(parts))]
    if legend:
        axes.legend(keys, parts, frameon=False, fontsize=8, loc=legend)


def schedules(results: Path, images: Path) -> None:
    """Seconds of an iteration's stages in each schedule; a line where it ends, for stages overlap."""
    rows = []
    for (file, variant), title in SCHEDULES.items():
        (row,) = (row for row in read(results / file)["rows"] if row["variant"] == variant)
        rows.append((title, row["seconds"]))
    figure, axes = plt.subplots(figsize=(1.2 * WIDTH, 0.9 + 0.4 * len(rows)), layout="constrained")
    stacked(axes, [(title, {part: seconds[part] for part in STAGES}, "") for title, seconds in rows])
    for place, (_, seconds) in enumerate(rows):
        total = seconds["total"]
        axes.vlines(total, place - 0.4, place + 0.4, color="black")
        axes.text(total, place, f" {total:.1f} s", va="center", fontsize=8, color="white")
    conditions = read(results / "overlap.json")["conditions"]
    title = f"An iteration on {conditions['gpus']} {conditions['device']}; black: when it ends, for stages overlap"
    finish(figure, axes, title, "seconds of each stage", images / "results_schedules.png")


def iterations(results: Path, images: Path) -> None:
    """Seconds of one prompt's rollout and update by stage, in the schedules of `iteration.py`; a panel a model."""
    contents = {model: found for model in NAMES if (found := by_schedule(results, model))}
    figure, panels = plt.subplots(1, len(contents), figsize=(1.7 * WIDTH, 2.6), layout="constrained")
    for axes, (model, content) in zip(np.atleast_1d(panels), contents.items(), strict=True):
        total, ours = content["total"], content["total"]["ours"]
        rows = [(name, content["seconds"][name], f" {total[name] / ours:.2f} ×") for name in BARS]
        stacked(axes, rows, legend="lower right" if model == "flux" else "")
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_title(f"{NAMES[model]}, {content['gpu']}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, images / "results_iterations.png")


def gpus(results: Path, images: Path) -> None:
    """Seconds of an iteration of 48 prompts over the GPUs of one host: planned, computed from what was measured, and
    the paper's.
    """
    planned = read(results / "many_gpus_planned.json")
    measured = whole_iterations(results)
    paper = PUBLISHED["iteration_seconds"]
    figure, panels = plt.subplots(1, len(paper), figsize=(1.7 * WIDTH, 3.2), layout="constrained")
    for axes, (model, (naive, two_stage)) in zip(panels, paper.items(), strict=True):
        line = sorted((row["gpus"], row["seconds"]) for row in planned if row["model"] == model)
        axes.plot(*zip(*line, strict=True), "--", color="gray", label="planned, H100")
        points = [(row["gpus"], row["seconds_48_prompts"]) for row in measured if row["model"] == model]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color="black", label="measured, computed for 48 prompts")
        axes.plot(8, naive, "^", color="tab:orange", label="paper, one stage, 8 B200")
        axes.plot(8, two_stage, "v", color="tab:blue", label="paper, two stages, 8 B200")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([gpus for gpus, _ in line], [str(gpus) for gpus, _ in line])
        low, high = axes.get_ylim()
        ticks = [tick for tick in (50, 100, 200, 500, 1000, 2000, 5000) if low < tick < high]
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("GPUs of one host")
        axes.set_ylabel("seconds an iteration")
        axes.set_title(NAMES[model], fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    save(figure, images / "results_gpus.png")


def fidelity(results: Path, images: Path) -> None:
    """Spearman of previews, by steps and by tier; of the published table if there is one."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    file = results / "rank_fidelity_published.json"
    if file.is_file():
        content = read(file)
        rows = [(row["tier"], row["steps"], row) for row in content["previews"]]
    else:
        content = read(results / "rank_fidelity.json")
        found = [row for row in content["previews"] if row["group"] in ("tier", "steps")]
        rows = [
            ("nvfp4-emulated", int(row["preview"].split()[0]), row)
            if row["group"] == "steps"
            else (row["preview"], 6, row)
            for row in found
        ]
    tiers = list(dict.fromkeys(tier for tier, _, _ in rows))
    for place, tier in enumerate(tiers):
        mine = {steps: row for name, steps, row in rows if name == tier}
        x = np.array(sorted(mine)) + 0.12 * (place - len(tiers) / 2)  # beside one another
        mean, high = (np.array([mine[steps][key] for steps in sorted(mine)]) for key in ("spearman", "spearman_high"))
        axes.errorbar(x, mean, yerr=high - mean, label=tier, marker="o", markersize=4, capsize=2)
    axes.set_xlabel("steps of a preview")
    axes.set_ylabel("Spearman")
    axes.set_title(f"Testbed, {content['prompts']} prompts × {content['seeds']} seeds, 95 % over prompts", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
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
        axes.set_xlabel("hours of one H200, charged as FLUX.1-dev")
        axes.set_title(title, fontsize=10)
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
    schedules(results, images)
    iterations(results, images)
    gpus(results, images)
    fidelity(results, images)
    objectives.draw(read(results / "objectives.json"), images / "objectives.png")
    if (results / "convergence.json").is_file():
        reward(results, images)


if __name__ == "__main__":
    main()
