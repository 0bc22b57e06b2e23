"""Rewards on emoji and videos after some simulated GPU time: for results/quality.md and `world_shapes.py`.

    python benchmarks/curves.py benchmarks/results/video_shapes_all_frames.json --as "wan22_5b, all frames"
    python benchmarks/curves.py benchmarks/results/emoji_shapes.json --each-seed

Prints the table of a file that `world_shapes.py` wrote: means over seeds, or each seed, with its highest and its last
reward.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from page_shapes import words
from page_tables import measured, read, table, unmeasured
from shape_results import BASE, HEADLINE, REAL, SHAPES, VIDEO, VIDEO_PREVIEWS

AFTER = {HEADLINE: (300.0, 600.0, 1200.0)} | dict.fromkeys(VIDEO_PREVIEWS, (3600.0, 7200.0, 14400.0))
"""Simulated model → seconds after which rewards are shown."""


def moving(results: Path) -> str:
    """The videos block of results/quality.md."""
    return _block(results, "video_shapes.json", VIDEO, "moving")


def emoji(results: Path) -> str:
    """The emoji block of results/quality.md."""
    return _block(results, "emoji_shapes.json", HEADLINE, "emoji")


def _block(results: Path, file: str, place: str, name: str) -> str:
    content = read(results, file)
    scale = f"{BASE} is the untrained model, {REAL} the real images. Simulated GPU time of `{place}`."
    return f"{curves(content, place)}\n\n{scale} {measured(name)}" if content else unmeasured(name)


def after(run: dict[str, Any], shape: str, seconds: float, of: str, place: str = HEADLINE) -> float:
    """A run's reward, or the judge's, after so many simulated seconds; nan if it has not trained that long."""
    charged = np.array(run["iterations"]) * SHAPES[shape].charged(place)
    values = run.get(of, [])
    return (
        float(np.interp(seconds, charged, values))
        if len(values) == len(charged) and seconds <= charged[-1]
        else math.nan
    )


def curves(results: dict[str, Any], place: str, *, each_seed: bool = False) -> str:
    """A table of means over the seeds that trained that long, with their number if not all did. With `each_seed`, a row
    per seed with its highest and its last reward.
    """
    times = AFTER[place]
    header = ["setting", "lr", "seed" if each_seed else "seeds", *(f"after {each:,.0f} s" for each in times)]
    header += ["highest", "last"] if each_seed else []
    rows = [
        [words(shape), f"{float(rate):g}", name, *(_cell(runs, shape, each, place) for each in times)]
        + ([f"{max(runs[name]['reward']):.3f}", f"{runs[name]['reward'][-1]:.3f}"] if each_seed else [])
        for shape, of_rate in sorted(results["runs"].items())
        for rate, of_seed in sorted(of_rate.items(), key=lambda item: float(item[0]))
        for name, runs in _rows(of_seed, each_seed)
    ]
    return table(header, rows)


def _rows(of_seed: dict[str, Any], each_seed: bool) -> list[tuple[str, dict[str, Any]]]:
    """Name → runs of a row: one seed each, or all of them."""
    if each_seed:
        return [(seed, {seed: run}) for seed, run in sorted(of_seed.items())]
    return [(str(len(of_seed)), of_seed)]


def _cell(of_seed: dict[str, Any], shape: str, seconds: float, place: str) -> str:
    judged = any("judge" in run for run in of_seed.values())
    cells = []
    for of in ("reward", "judge") if judged else ("reward",):
        values = [after(run, shape, seconds, of, place) for run in of_seed.values()]
        known = [value for value in values if not math.isnan(value)]
        fewer = f" ({len(known)})" if known and len(known) < len(values) else ""
        cells.append(f"{np.mean(known):.3f}{fewer}" if known else "–")
    return " / ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="results file of world_shapes.py")
    parser.add_argument(
        "--as", dest="place", choices=AFTER, default=HEADLINE, help="model whose time an iteration takes"
    )
    parser.add_argument("--each-seed", action="store_true", help="print each seed instead of means over seeds")
    arguments = parser.parse_args()
    print(curves(json.loads(arguments.file.read_text()), arguments.place, each_seed=arguments.each_seed))


if __name__ == "__main__":
    main()
