"""Tables of the results page: how previews rank a pool."""

from __future__ import annotations

from pathlib import Path

from page_tables import PUBLISHED, measured, read, table, unmeasured


def fidelity(results: Path) -> str:
    content = read(results, "rank_fidelity.json")
    previews = content["previews"]
    rows = []
    for row in (row for row in previews if row["group"] in ("tier", "steps")):
        half = row["spearman_high"] - row["spearman"]
        tier, steps = (
            ("nvfp4-emulated", row["preview"].split()[0]) if row["group"] == "steps" else (row["preview"], "6")
        )
        beats = f"{row['best_beats']:.1%} / {row['worst_beats']:.1%}"
        rows.append([tier, steps, f"{row['spearman']:.3f} ± {half:.3f}", f"{row['kendall']:.3f}", beats])
    best, worst = perfect(content["keep"] // 2, content["seeds"])
    rows.append(["if perfect", "", "1", "1", f"{best:.1%} / {worst:.1%}"])
    distinct = list(dict.fromkeys(map(tuple, rows)))
    return table(["tier", "steps", "Spearman", "Kendall", "best beat / worst beat"], distinct)


def ranking(results: Path) -> str:
    """The paper's table, and ours in its unit: mean places from 1, over the pool."""
    paper, found = PUBLISHED["ranking"], read(results, "rank_fidelity_published.json")
    pairs = [f"{paper['match'][k]:.1%} / {paper['false'][k]:.1%}" for k in ("4", "8", "12")]
    rows = [["paper", "nvfp4", "6", f"{paper['spearman']:.3f}", f"{paper['kendall']:.3f}", *pairs]]
    for row in found["previews"] if found else ():
        sides = ((row[f"best_beats_{k}"], row[f"worst_beats_{k}"]) for k in (4, 8, 12))
        pairs = [" / ".join(f"{place(share, found['seeds']):.1%}" for share in side) for side in sides]
        fidelity = [f"{row['spearman']:.3f}", f"{row['kendall']:.3f}"]
        rows.append(["testbed", row["tier"], str(row["steps"]), *fidelity, *pairs])
    ideal = [" / ".join(f"{place(share, 96):.1%}" for share in perfect(k, 96)) for k in (4, 8, 12)]
    rows.append(["if perfect", "", "", "1", "1", *ideal])
    header = ["", "tier", "steps", "Spearman", "Kendall", "of 4", "of 8", "of 12"]
    said = measured("ranking") if found else unmeasured("ranking")
    return f"{table(header, rows)}\n\n{said}"


def perfect(side: int, seeds: int) -> tuple[float, float]:
    """Shares of the others that the `side` best and the `side` worst of a pool beat."""
    worst = (side - 1) / 2 / (seeds - 1)
    return 1 - worst, worst


def place(beaten: float, seeds: int) -> float:
    """The place of a seed that beats such a share of the others, from 1 for the worst, over the pool."""
    return (beaten * (seeds - 1) + 1) / seeds
