"""Pictures of what was measured on GPUs, from the numbers under results/: no GPU is needed to draw them again.

    python benchmarks/plots.py [--results FOLDER]

Writes forward.png and rollout.png beside forward.json and rollout_*.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
NAMES = {"flux": "FLUX.1-dev", "sd3": "SD3.5-Large", "sana": "SANA 1.6B"}
PARTS = ("naive", "previews", "regeneration")
WIDTH = 7.5
"""Inches."""


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def finish(figure: Figure, axes: Axes, title: str, unit: str, path: Path) -> None:
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    print(path)


def stacked(axes: Axes, rows: list[tuple[str, dict[str, float], str]]) -> None:
    """One bar a row: its name, seconds by what they are spent on, and what is said behind it."""
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
    axes.legend(keys, parts, frameon=False, fontsize=8, loc="center right")


def forward(results: Path) -> None:
    """Speed of each tier over compiled bfloat16, beside its aim."""
    content = read(results / "forward.json")
    rows = [row for row in content["results"] if row["tier"] != "bf16"]
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.4 * len(rows)), layout="constrained")
    names = [f"{NAMES[row['model']]}, batch {row['batch']}, {row['tier']}" for row in rows]
    bars = axes.barh(names, [row["speed"] for row in rows])
    axes.bar_label(bars, [f"{row['speed']:.2f} × (aim {content['aims'][row['model']]})" for row in rows], padding=6)
    for place, row in enumerate(rows):
        axes.vlines(content["aims"][row["model"]], place - 0.4, place + 0.4, color="black")
    axes.set_xlim(0, 1.4 * max(row["speed"] for row in rows))
    title = f"A transformer's forward, {content['device']}, PyTorch {content['torch']}"
    finish(figure, axes, title, "times the speed of compiled bfloat16", results / "forward.png")


def rollout(results: Path) -> None:
    """Seconds of a prompt's rollout, both ways, by what they are spent on."""
    rows: list[tuple[str, dict[str, float], str]] = []
    contents = {path.stem.removeprefix("rollout_"): read(path) for path in sorted(results.glob("rollout_*.json"))}
    for name, content in contents.items():
        model, *scope = name.split("_")
        seconds = content["seconds"]
        spent = {part: seconds[part] - seconds[f"decode, score: {part}"] for part in PARTS}
        decoding = {part: seconds[f"decode, score: {part}"] for part in PARTS}
        naive = {"full precision": spent["naive"], "decode, score": decoding["naive"]}
        two_stage = {
            "previews": spent["previews"],
            "full precision": spent["regeneration"],
            "decode, score": decoding["previews"] + decoding["regeneration"],
        }
        rows.append((" ".join([NAMES[model], *scope]), naive, ""))
        rows.append(
            (f"in two stages, {content['tier']}", two_stage, f"  {content['ratio']:.2f} × (aim {content['aim']})")
        )
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.3 * len(rows)), layout="constrained")
    stacked(axes, rows)
    first = next(iter(contents.values()))
    title = f"Rollout of one prompt, {first['gpu']}, PyTorch {first['torch']}"
    finish(figure, axes, title, "seconds", results / "rollout.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    results = parser.parse_args().results
    forward(results)
    rollout(results)


if __name__ == "__main__":
    main()
