"""Tables of the results page: held-out reward of the campaign's runs, over iterations and charged time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from page_tables import PUBLISHED, measured, read, table, unmeasured
from time_to_target import row, times, times_sooner, together, whole_runs
from variants import TABLES

from solrl_ray.report.curve import SHARES

EQUAL_TIME_FILE = "convergence_88.json"
COLLAPSE_FILE = "convergence_200.json"
COLLAPSE_AFTER = (40, 80, 120, 160)
"""Columns: iterations."""
EQUAL_TIME = (
    *("direct", "direct_12", "direct_8", "direct_8_two_updates"),
    *("two_stage_pruned", "lean_96", "lean_48", "lean_48_keep_8", "lean_48_keep_8_two_updates"),
)
DIRECT_ITERATIONS = (10, 15, 20, 24, 30, 37)
"""Columns: the charged time of so many iterations of `direct`."""
HEADLINE = ("direct_8", "lean_48_keep_8", "lean_48", "two_stage_pruned", "two_stage_fp8", "two_stage_nvfp4")
CHARGED = {"flux1_dev": "FLUX.1-dev", "sd35_large": "SD3.5-Large"}
HEADLINE_SHARE = 0.9


def campaign(name: str) -> Callable[[Path], str]:
    """The block of a table of `variants.py`: what is measured of it, and the paper's HPSv2 if it has such a table."""

    def block(results: Path) -> str:
        content, paper = read(results, "convergence.json"), PUBLISHED.get(name, {})
        found = {} if content is None else content["comparisons"]
        own = found.keys() & set(TABLES[name])
        if name != "convergence" and own <= set(TABLES["convergence"]):  # nothing but its baselines
            found = {}
        rows = []
        for variant in TABLES[name]:
            if variant in found:
                rows.append([variant, *row(content, variant), f"{paper[variant]:.4f}" if variant in paper else ""])
            elif variant in paper:
                rows.append([variant, "", "", "", "", "", f"{paper[variant]:.4f}"])
        shares = " / ".join(f"{share:.0%}" for share in SHARES)
        header = [
            "variant",
            "seeds",
            "held-out reward",
            "words that hold",
            f"iterations to {shares}",
            f"× sooner, {shares}",
            "paper, HPSv2",
        ]
        kept = [place for place in range(len(header)) if place == 0 or any(row[place] for row in rows)]
        missing = [variant for variant in TABLES[name] if variant not in found]
        some = ["Not all measured yet"] if len(missing) < len(TABLES[name]) else []
        said = unmeasured(name, *some) if missing else measured(name)
        shown = [table([header[i] for i in kept], ([row[i] for i in kept] for row in rows))] if rows else []
        return "\n\n".join([*shown, said])

    return block


def collapse(results: Path) -> str:
    """Held-out rewards of each long run on its way, and the most that one fell below the best it had had before.

    Runs that were cut short are shown too: a fall can be seen before a run's end.
    """
    content, paper = read(results, COLLAPSE_FILE), PUBLISHED["quantized"]
    published = table(["paper, HPSv2", *paper], [["", *(f"{value:.4f}" for value in paper.values())]])
    if content is None:
        return f"{published}\n\n{unmeasured('quantized')}"
    rows = []
    for name in paper:
        for seed, run in sorted(content["runs"].get(name, {}).items()):
            made, reward = run["iterations"], np.array(run["reward"])
            on_the_way = [f"{reward[made.index(count)]:.3f}" if count in made else "" for count in COLLAPSE_AFTER]
            falls = np.maximum.accumulate(reward) - reward
            lowest = int(falls.argmax())
            last = [f"{reward[-1]:.3f}, after {made[-1]}"]
            rows.append([name, seed, *on_the_way, *last, f"{falls[lowest]:.3f}, after {made[lowest]}"])
    columns = [f"after {count}" for count in COLLAPSE_AFTER]
    header = ["held-out reward", "seed", *columns, "last", "largest fall from its best so far"]
    return f"{published}\n\n{table(header, rows)}\n\n{measured('quantized')}"


def equal_time(results: Path) -> str:
    """Held-out reward after equal charged time, on a line between evaluations, a table for each model whose prices are
    charged; longer runs have rows of their own.
    """
    content, longer = read(results, "convergence.json"), read(results, EQUAL_TIME_FILE)
    if content is None:
        return unmeasured("convergence")
    found = [(name, runs) for name, runs in whole_runs(content).items() if name in EQUAL_TIME]
    if longer is not None:
        found += [(f"{name}, {longer['iterations']} iterations", runs) for name, runs in whole_runs(longer).items()]
    found.sort(key=lambda row: EQUAL_TIME.index(row[0].partition(",")[0]))
    shown = "\n\n".join(_after_time(found, content["charged"], model) for model in CHARGED)
    by = measured("convergence", "lean", "updates", "equal_time")
    return f"{shown}\n\n{by if longer else unmeasured('equal_time', 'Longer runs are not measured yet')}"


def _after_time(
    found: Sequence[tuple[str, Mapping[str, Any]]], charged: Mapping[str, Mapping[str, float]], model: str
) -> str:
    """`found`: row's title and runs; `charged`: seconds of an iteration by variant and model."""
    price = {name: of_model[model] for name, of_model in charged.items()}
    rows = []
    for title, runs in found:
        made, reward = together(runs)
        name, mean = title.partition(",")[0], reward.mean(axis=0)
        after = [count * price["direct"] / price[name] for count in DIRECT_ITERATIONS]
        cells = [f"{np.interp(each, made, mean):.3f}" if each <= made[-1] else "" for each in after]
        rows.append([title, str(len(runs)), f"{price[name]:.0f}", *cells])
    columns = [f"of {count}" for count in DIRECT_ITERATIONS]
    return table([f"reward after the time, as {CHARGED[model]}", "seeds", "s an iteration", *columns], rows)


def own_statistics(results: Path) -> str:
    """Gains of two rewards of different scales, summed as they are and with own statistics: means ± standard errors
    over seeds.
    """
    content = read(results, "own_statistics.json")
    seeds = {row: list(of.values()) for row, of in content["gains"].items() if of} if content else {}
    if not seeds:
        return unmeasured("own_statistics")
    rewards = list(dict.fromkeys(reward for runs in seeds.values() for gains in runs for reward in gains))
    rows = [
        [row, str(len(runs)), *(_gain([gains[r] for gains in runs]) for r in rewards)] for row, runs in seeds.items()
    ]
    header = [f"held-out gain after {content['iterations']} iterations", "seeds", *rewards]
    return f"{table(header, rows)}\n\n{measured('own_statistics')}"


def _gain(values: Sequence[float]) -> str:
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):+.4f}{error}"


def headline(results: Path) -> str:
    """How many times sooner two stages, or few seeds alone, have a share of the gain of the published one-stage
    strategies, in charged time. Longer runs of a variant are taken if there are as many: more of them have come so far.
    """
    content, longer = read(results, "convergence.json"), read(results, EQUAL_TIME_FILE)
    runs = {} if content is None else whole_runs(content)
    long_runs = {} if longer is None else whole_runs(longer)
    rows = []
    for name in (name for name in HEADLINE if {name, "direct", "scaled"} <= runs.keys()):
        long = len(long_runs.get(name, {})) >= len(runs[name])
        mine, called = (long_runs[name], f"{name}, {longer['iterations']} iterations") if long else (runs[name], name)
        for model, title in CHARGED.items():
            cells, place = [called, title], SHARES.index(HEADLINE_SHARE)
            for other, prices in (("scaled", None), ("direct", "released"), ("direct", None)):
                price = content[prices][model] if prices else content["charged"][other][model]
                ratios = times_sooner(mine, runs[other], price / content["charged"][name][model])
                cells.append(f"{times(ratios[place])} ×")
            rows.append(cells)
    if not rows:
        return unmeasured("convergence")
    share = f"{HEADLINE_SHARE:.0%}"
    header = [
        "× sooner",
        "charged as",
        "than 24 of 96, compiled",
        "than 24 of 24, as released",
        "than 24 of 24, compiled",
    ]
    by = measured("convergence", "lean", "equal_time")
    return f"Time to {share} of the other's gain:\n\n{table(header, rows)}\n\n{by}"


def sooner(results: Path) -> str:
    """The paper's, then ours."""
    models = list(next(iter(PUBLISHED["times_sooner"].values())))
    rows = [[reward, *(f"{found[m]:.1f} ×" for m in models)] for reward, found in PUBLISHED["times_sooner"].items()]
    return f"{table(['paper', *models], rows)}\n\n{campaign('convergence')(results)}"


def reward_figure(results: Path) -> str:
    content = read(results, "convergence.json")
    if content is None or not content["comparisons"]:
        return f"*Held-out reward against GPU-hours.* {unmeasured('convergence')}"
    picture = "![Held-out reward against charged GPU-hours, by variant](images/results_reward.png)"
    return f"{picture}\n\n{measured('convergence')}"
