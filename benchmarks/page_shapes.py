"""Tables of results/quality.md: how fast each setting of an iteration learns, in one stage and in two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_tables import measured, read, table, unmeasured
from shape_results import FRONT, REFERENCE, SHAPES, SHARES, Shape, Times, best_rate, fall, ranked, ratio, times

FILE = "shapes.json"
DEFAULT = Shape(1, 4, 24, 3, "shared_noise").name
SHOWN = FRONT + 3
"""Settings of each side in the table."""
SIDES = {True: "two stages", False: "one stage"}


def shapes_of(results: Path) -> Any:
    """The results of all settings; None until a run has been evaluated twice."""
    content = read(results, FILE)
    return content if content and content.get("rates") else None


def side(content: Any, two_stage: bool) -> list[str]:
    return [name for name in content["rates"] if bool(SHAPES[name].pool) == two_stage]


def words(name: str) -> str:
    shape = SHAPES[name]
    steps = f" × {shape.steps} steps" if shape.steps > 1 else ""
    prompts = "1 prompt" if shape.prompts == 1 else f"{shape.prompts} prompts"
    return f"{shape.chosen} of {shape.pool or shape.chosen}, {prompts}{steps}{shape.option and f', `{shape.option}`'}"


def faster(mine: Times, other: Times) -> str:
    """The speed-up with its interval, or a note that it has one seed; a bound if not all others reached the target."""
    if not (found := ratio(mine, other)):
        return "–"
    middle, low, high = found
    text = f"{middle:.2f}×" + (" (one seed)" if low is None else f" ({low:.2f}–{high:.2f})")
    return ("" if other.complete else "at least ") + text


def seconds(took: Times) -> str:
    """The mean time in seconds; a bound if not all runs reached the target."""
    if not took.there:
        return "–"
    return f"{'' if took.complete else '> '}{took.mean:,.0f}{' (one seed)' * (len(took.seconds) == 1)}"


def headline(results: Path) -> str:
    """Block: the best setting with two stages and with one, by share of the gap closed; the default, and 24 of 24."""
    content = shapes_of(results)
    if content is None:
        return unmeasured("shapes")
    rows = [[f"{share:.0%}", *_best(content, share)] for share in SHARES]
    header = ["gap closed", "best two-stage setting, s", "best one-stage setting, s", "two stages are faster by"]
    return "\n\n".join([table(header, rows), *_default(content), *_against_reference(content), measured("shapes")])


def _best(content: Any, share: float) -> list[str]:
    """Table cells: the fastest setting of each side with its seconds, and the ratio."""
    found = [next(iter(ranked(content["runs"], two, share)), (Times((), 0), "", "")) for two in SIDES]
    cells = [f"{seconds(took)}: {words(name)}, lr {rate}" if took.there else "–" for took, name, rate in found]
    return [*cells, faster(*(took for took, _, _ in found))]


def _default(content: Any) -> Iterator[str]:
    """A sentence that compares the setting of `sol_rl` with the best one-stage setting."""
    one = next(iter(ranked(content["runs"], False)), None)
    mine, _ = best_rate(content["runs"], DEFAULT)
    if one and mine.there:
        closes = f"The default of `sol_rl` ({words(DEFAULT)}) closes 90% of the gap after {seconds(mine)} s"
        yield f"{closes}, {faster(mine, one[0])} faster than the best one-stage setting."


def _against_reference(content: Any) -> Iterator[str]:
    """A sentence that compares the best two-stage setting with 24 of 24."""
    best = next(iter(ranked(content["runs"], True)), None)
    reference, _ = best_rate(content["runs"], REFERENCE)
    if best and reference.there:
        reached = f" ({reference.there} of {len(reference.seconds)} seeds reached it)" * (not reference.complete)
        closes = f"`{words(REFERENCE)}` in one stage closes 90% after {seconds(reference)} s{reached}"
        yield f"{closes}; the best two-stage setting is {faster(best[0], reference)} faster."


def figure(results: Path) -> str:
    content = shapes_of(results)
    if content is None:
        return unmeasured("shapes")
    sentences = []
    for two_stage, title in SIDES.items():
        reached = ", ".join(f"{len(ranked(content['runs'], two_stage, share))} closed {share:.0%}" for share in SHARES)
        sentences.append(f"Of {len(side(content, two_stage))} settings in {title}, {reached}.")
    image = "![Simulated GPU time to close 75, 90 and 95 % of the gap, by samples per optimiser step]"
    return f"{image}(../images/results_shapes.png)\n\n{' '.join(sentences)} {measured('shapes')}"


def front(results: Path) -> str:
    """Block: table of the fastest settings of each side, and 24 of 24."""
    content = shapes_of(results)
    if content is None:
        return unmeasured("shapes")
    runs = content["runs"]
    shown = [(title, name, rate) for two, title in SIDES.items() for _, name, rate in ranked(runs, two)[:SHOWN]]
    if REFERENCE in content["rates"] and REFERENCE not in (name for _, name, _ in shown):
        shown.append(("one stage", REFERENCE, best_rate(runs, REFERENCE)[1]))
    header = ["", "setting", "samples per step", "lr", "s to 75% / 90% / 95%", "seeds at 90%", "largest fall"]
    rows = []
    for title, name, rate in shown:
        took = [times(runs, name, rate, share) for share in SHARES]
        worst = max(map(fall, runs[name][rate].values()))
        samples = str(SHAPES[name].prompts * SHAPES[name].chosen)
        reached = f"{took[1].there} of {len(took[1].seconds)}"
        rows.append([title, words(name), samples, rate, " / ".join(map(seconds, took)), reached, f"{worst:.3f}"])
    return f"{table(header, rows)}\n\n{measured('shapes')}"
