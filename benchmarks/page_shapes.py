"""Tables of the results page: which shape of an iteration comes soonest to a good model, in one stage and in two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_tables import measured, read, table, unmeasured
from shape_results import (
    BASE,
    FRONT,
    HEADLINE,
    REAL,
    REFERENCE,
    SHAPES,
    SHARES,
    Shape,
    Times,
    best_rate,
    fall,
    ranked,
    ratio,
    times,
)

FILE, NOISE_FILE = "shapes.json", "gradient_noise.json"
DEFAULT = Shape(1, 4, 24, 3, "shared_noise").name
SHOWN = FRONT + 3
"""Shapes of each side in the table."""
SIDES = {True: "two stages", False: "one stage"}


def shapes_of(results: Path) -> Any:
    """The map; None before its first run was evaluated twice."""
    content = read(results, FILE)
    return content if content and content.get("rates") else None


def side(content: Any, two_stage: bool) -> list[str]:
    return [name for name in content["rates"] if bool(SHAPES[name].pool) == two_stage]


def words(name: str) -> str:
    shape = SHAPES[name]
    steps = f" × {shape.steps} steps" if shape.steps > 1 else ""
    prompts = "1 prompt" if shape.prompts == 1 else f"{shape.prompts} prompts"
    return f"{shape.chosen} of {shape.pool or shape.chosen}, {prompts}{steps}{shape.option and f', `{shape.option}`'}"


def sooner(mine: Times, other: Times) -> str:
    """How many times, with its interval or a word that it has none; a bound if not all others were there."""
    if not (found := ratio(mine, other)):
        return "–"
    middle, low, high = found
    said = f"{middle:.2f} ×" + (" (one seed)" if low is None else f" ({low:.2f}–{high:.2f})")
    return ("" if other.complete else "at least ") + said


def seconds(took: Times) -> str:
    """The mean, a bound if not all were there."""
    if not took.there:
        return "–"
    return f"{'' if took.complete else '> '}{took.mean:,.0f}{' (one seed)' * (len(took.seconds) == 1)}"


def longest(content: Any, name: str, rate: str) -> tuple[float, float]:
    """The largest reward that a seed of a shape came to in the charged seconds that all of its seeds had, and those."""
    runs = content["runs"][name][rate].values()
    last = min(run["iterations"][-1] for run in runs)
    reward = max(
        reward for run in runs for made, reward in zip(run["iterations"], run["reward"], strict=True) if made <= last
    )
    return reward, last * SHAPES[name].charged(HEADLINE)


def headline(results: Path) -> str:
    """The best of both sides by the share of the way, and 24 of 24."""
    content = shapes_of(results)
    if content is None:
        return unmeasured("shapes")
    rows = [[f"{share:.0%}", *_best(content, share)] for share in SHARES]
    header = ["of the way", "two stages, s", "one stage, s", "two stages are sooner"]
    found = [table(header, rows), *_default(content), *_beside_reference(content), measured("shapes")]
    return "\n\n".join(found)


def _best(content: Any, share: float) -> list[str]:
    """Of each side the soonest shape with its seconds, and the ratio."""
    found = [next(iter(ranked(content["runs"], two, share)), (Times((), 0), "", "")) for two in SIDES]
    cells = [f"{seconds(took)}: {words(name)}, rate {rate}" if took.there else "–" for took, name, rate in found]
    return [*cells, sooner(*(took for took, _, _ in found))]


def _default(content: Any) -> Iterator[str]:
    """A sentence on the shape of `sol_rl`: how many times sooner than the best of one stage."""
    one = next(iter(ranked(content["runs"], False)), None)
    mine, _ = best_rate(content["runs"], DEFAULT)
    if one and mine.there:
        there = f"{words(DEFAULT)}, the shape of `sol_rl`, is at 90% after {seconds(mine)} s"
        yield f"{there}: {sooner(mine, one[0])} sooner than that best of one stage."


def _beside_reference(content: Any) -> Iterator[str]:
    """A sentence on 24 of 24: how many times later than the best of two stages, or at least so many."""
    best = next(iter(ranked(content["runs"], True)), None)
    if REFERENCE not in content["rates"] or not best:
        return
    reference, rate = best_rate(content["runs"], REFERENCE)
    name, over = words(REFERENCE), sooner(best[0], reference)
    if reference.there:
        there = f" ({reference.there} of {len(reference.seconds)} seeds were there)" * (not reference.complete)
        yield f"{name}, is at 90% after {seconds(reference)} s{there}; the best of two stages is {over} sooner."
        return
    reward, trained = longest(content, REFERENCE, rate)
    over = f"more than {trained / best[0].mean:.2f} × sooner"
    yield f"{name}, was at most at {way(reward):.0%} in {trained:,.0f} s; the best of two stages is at 90% {over}."


def way(reward: float) -> float:
    return (reward - BASE) / (REAL - BASE)


def figure(results: Path) -> str:
    content = shapes_of(results)
    if content is None:
        return f"*Time to shares of the way, by shape.* {unmeasured('shapes')}"
    said = []
    for two_stage, title in SIDES.items():
        came = ", ".join(f"{len(ranked(content['runs'], two_stage, share))} came to {share:.0%}" for share in SHARES)
        said.append(f"Of {len(side(content, two_stage))} shapes in {title} (one with an option is another) {came}.")
    tried: dict[str, int] = {}
    for of_rate in (content["runs"][name] for name in content["rates"]):
        for rate in of_rate:
            tried[rate] = tried.get(rate, 0) + 1
    rates = ", ".join(f"{rate} ({count} shapes)" for rate, count in sorted(tried.items(), key=lambda item: -item[1]))
    picture = "![Charged seconds to shares of the way, by samples of an optimiser step](images/results_shapes.png)"
    return f"{picture}\n\n{' '.join(said)} Learning rates tried: {rates}.\n\n{measured('shapes')}"


def front(results: Path) -> str:
    """The soonest shapes of each side, and 24 of 24."""
    content = shapes_of(results)
    if content is None:
        return unmeasured("shapes")
    runs = content["runs"]
    shown = [(title, name, rate) for two, title in SIDES.items() for _, name, rate in ranked(runs, two)[:SHOWN]]
    if REFERENCE in content["rates"] and REFERENCE not in (name for _, name, _ in shown):
        shown.append(("one stage", REFERENCE, best_rate(runs, REFERENCE)[1]))
    header = [
        "",
        "shape",
        "samples a step",
        "rate",
        "s to 75% / 90% / 95%",
        "seeds, at 90%",
        "highest reward",
        "worst fall",
    ]
    rows = []
    for title, name, rate in shown:
        took = [times(runs, name, rate, share) for share in SHARES]
        reward, trained = longest(content, name, rate)
        worst = max(map(fall, runs[name][rate].values()))
        shape, at_90 = SHAPES[name], took[1]
        cells = [" / ".join(map(seconds, took)), f"{len(at_90.seconds)}, {at_90.there}"]
        samples = str(shape.prompts * shape.chosen)
        rows.append([title, words(name), samples, rate, *cells, f"{reward:.3f}, in {trained:,.0f} s", f"{worst:.3f}"])
    return f"{table(header, rows)}\n\n{measured('shapes')}"


def gradient_noise(results: Path) -> str:
    """Signal over noise of a group's gradient, and of a charged second of groups."""
    content = read(results, NOISE_FILE)
    if content is None:
        return unmeasured("gradient_noise")
    rows = []
    for policy, of in content.items():
        for name, row in of["rows"].items():
            seconds, sure = row["seconds"], f"{row['ratio']:.3f} ± {row['stderr']:.3f}"
            worth = f"{1000 * row['ratio'] / seconds:.1f} ± {1000 * row['stderr'] / seconds:.1f}"
            who = f"{policy}, reward {of['reward']:.2f}"
            seeds, _, option = name.replace("of", " of ", 1).partition("+")
            seeds += f", `{option}`" * bool(option)
            rows.append([who, seeds, str(of["prompts"]), sure, f"{seconds:.1f}", worth])
    header = ["policy", "seeds", "prompts", "signal over noise, a group", "s a group", "the same of 1,000 s"]
    picture = "![Signal over noise of a group's gradient against its price](images/results_gradient_noise.png)"
    return f"{picture}\n\n{table(header, rows)}\n\n±: a standard error. {measured('gradient_noise')}"
