"""Write the tables of docs/results, from benchmarks/results/ and the paper's figures in benchmarks/published.json.

    python benchmarks/results_page.py

Replaces each block between ``<!-- NAME -->`` and ``<!-- / -->``. The rest of a page is written by hand and has no
figures. A block ``kept-NAME`` is also written by hand: its figures are measured or come from a results file, and it
names the command that prints them, or a commit that has the script.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import curves
import page_shapes
import page_speed
from page_tables import PUBLISHED, RESULTS, ROOT, measured, read, table, unmeasured

PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
BLOCK = re.compile(r"<!-- ([a-z-]+) -->\n.*?<!-- / -->", re.DOTALL)
KEPT = "kept-"
STEPS = (2, 6, 10)
"""Preview steps in the ranking table."""


def ranking(results: Path) -> str:
    """The paper's ranking table with our rows, in its unit: mean rank from 1, as a share of the pool."""
    paper, found = PUBLISHED["ranking"], read(results, "rank_fidelity_published.json") or {"previews": ()}
    pairs = [f"{paper['match'][k]:.1%} / {paper['false'][k]:.1%}" for k in ("4", "8", "12")]
    rows = [["paper", "nvfp4", "6", f"{paper['spearman']:.3f}", f"{paper['kendall']:.3f}", *pairs]]
    for row in (row for row in found["previews"] if row["steps"] in STEPS):
        sides = ((row[f"best_beats_{k}"], row[f"worst_beats_{k}"]) for k in (4, 8, 12))
        pairs = [" / ".join(f"{place(share, found['seeds']):.1%}" for share in side) for side in sides]
        fidelity = [f"{row['spearman']:.3f}", f"{row['kendall']:.3f}"]
        rows.append(["testbed", row["tier"], str(row["steps"]), *fidelity, *pairs])
    header = ["", "precision", "steps", "Spearman", "Kendall", "4 chosen", "8 chosen", "12 chosen"]
    source = measured("ranking") if found["previews"] else unmeasured("ranking")
    return f"{table(header, rows)}\n\n{source}"


def place(beaten: float, seeds: int) -> float:
    """Rank of a seed that beats the share `beaten` of the others, as a share of the pool; the worst has rank 1."""
    return (beaten * (seeds - 1) + 1) / seeds


BLOCKS: dict[str, Callable[[Path], str]] = {
    "headline": page_shapes.headline,
    "shapes-figure": page_shapes.figure,
    "front": page_shapes.front,
    "moving": curves.moving,
    "emoji": curves.emoji,
    "rollouts": page_speed.rollouts,
    "gpus": page_speed.gpus,
    "hosts": page_speed.hosts,
    "ranking": ranking,
}


def render(page: str, results: Path = RESULTS) -> str:
    """Return the page with new tables. Raises KeyError for an unknown block name."""

    def block(found: re.Match[str]) -> str:
        if found[1].startswith(KEPT):
            return found[0]
        return f"<!-- {found[1]} -->\n{BLOCKS[found[1]](results)}\n<!-- / -->"

    return BLOCK.sub(block, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    results = parser.parse_args().results
    for page in PAGES:
        page.write_text(render(page.read_text(), results))
        print(page)


if __name__ == "__main__":
    main()
