"""The tables of docs/results.md, from benchmarks/results/ and the paper's figures in benchmarks/published.json.

    python benchmarks/results_page.py

A table stands between ``<!-- NAME -->`` and ``<!-- / -->``; the rest of the page is written by hand and has no figures.
What has no results file yet is said to be not measured yet, with the command that measures it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import page_campaign
import page_ranking
import page_speed
from page_tables import PUBLISHED, RESULTS, ROOT, measured, read, table, unmeasured
from variants import TABLES

PAGE = ROOT / "docs" / "results.md"
BLOCK = re.compile(r"<!-- ([a-z-]+) -->\n.*?<!-- / -->", re.DOTALL)


def rewards(results: Path) -> str:
    paper, ours = PUBLISHED["rewards"], read(results, "published_flux1_dev_published.json")
    rows = [[f"{name} (paper)", *(f"{value:.4f}" for value in values)] for name, values in paper["rows"].items()]
    if ours is not None:
        order = ("imagereward", "clipscore", "pickscore", "hpsv2")
        last = ours["rows"][-1]
        for name, scores in (("base", ours["base"]), (f"after {last['updates']} iterations", last["scores"])):
            rows.append([name, *(f"{scores[key][0]:.4f} ± {scores[key][1]:.4f}" for key in order)])
    said = measured("rewards") if ours else unmeasured("rewards")
    return f"{table(['FLUX.1', *paper['columns']], rows)}\n\n{said}"


BLOCKS: dict[str, Callable[[Path], str]] = {
    "reward-figure": page_campaign.reward_figure,
    "headline": page_campaign.headline,
    "rollouts": page_speed.rollouts,
    "iterations": page_speed.iterations,
    "loops": page_speed.loops,
    "gpus": page_speed.gpus,
    "hosts": page_speed.hosts,
    "placements": page_speed.placements,
    "schedules": page_speed.schedules,
    "fidelity": page_ranking.fidelity,
    "ranking": page_ranking.ranking,
    "sooner": page_campaign.sooner,
    "equal-time": page_campaign.equal_time,
    "rewards": rewards,
    **{name.replace("_", "-"): page_campaign.campaign(name) for name in TABLES if name != "convergence"},
    "quantized": page_campaign.collapse,
}


def render(page: str, results: Path = RESULTS) -> str:
    """The page with its tables made anew. Raises KeyError: a block of another name."""
    return BLOCK.sub(lambda found: f"<!-- {found[1]} -->\n{BLOCKS[found[1]](results)}\n<!-- / -->", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    PAGE.write_text(render(PAGE.read_text(), parser.parse_args().results))
    print(PAGE)


if __name__ == "__main__":
    main()
