"""The tables of docs/results.md, from benchmarks/results/ and the paper's figures in benchmarks/published.json.

    python benchmarks/results_page.py

A table stands between ``<!-- NAME -->`` and ``<!-- / -->``; the rest of the page is written by hand and has no figures.
What has no results file yet is said to be not measured yet, with the command that measures it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from convergence import plus_minus, times
from time_to_target import mean_with_interval, times_sooner, together, whole_runs
from variants import TABLES

from solrl_ray.report.curve import SHARES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- ([a-z-]+) -->\n.*?<!-- / -->", re.DOTALL)
TITLES = {"flux": "FLUX.1-dev, 512 px", "sd3": "SD3.5-Large, 1024 px", "sana": "SANA 1.6B, 1024 px"}
LOOPS = {"z_image": "Z-Image, 512 px", "qwen_image": "Qwen-Image, 512 px"}
"""End of the name of a whole loop's results file → model. Older files are not of the present code."""
SCOPES = ("", "small decoder", "all blocks", "all blocks small decoder")
"""Ends of the results files' names, as words."""
PAGES_CARD = "H200"
"""On which rollouts are, if their row says nothing else."""
SCHEDULES = {
    ("overlap.json", "colocated/0"): "all on both GPUs, in turns",
    ("overlap.json", "split/0"): "samplers on one GPU, learner on the other",
    ("overlap_std_group.json", "split/0"): "so, learning group by group",
    ("overlap.json", "split/1"): "so, exploring one iteration ahead instead",
}
"""Results file and variant → what a user would call it."""
PARTS = ("ahead", "explore", "regenerate", "learn", "checkpoint", "publish")
CAMPAIGN = "python benchmarks/convergence.py"
ON_GPU = "--gpu --one-process --at-once 16"
COMMANDS = {
    "convergence": f"{CAMPAIGN} {ON_GPU} --judge",
    **{name: f"{CAMPAIGN} --table {name} {ON_GPU} --seeds 3" for name in TABLES if name != "convergence"},
    "quantized": f"{CAMPAIGN} --table quantized --iterations 200 --root runs/convergence_200 "
    f"--results benchmarks/results/convergence_200.json {ON_GPU} --seeds 3",
    "ranking": "python benchmarks/rank_fidelity.py --only published --prompts 256 --seeds 96 --work FOLDER "
    "--device cuda",
    "rewards": "python benchmarks/published_evaluation.py runs/flux1_dev_published",
    "equal_time": f"{CAMPAIGN} --only direct_8 --iterations 88 --root runs/convergence_88 "
    f"--results benchmarks/results/convergence_88.json {ON_GPU} --seeds 3",
    "gpus": "python benchmarks/many_gpus.py flux --gpus 2",
    "hosts": "python benchmarks/many_gpus.py flux --plan h100-80",
    "placements": "python benchmarks/many_gpus.py flux --gpus 2 --layers 6 --placement split",
}
MAIN = ("convergence", "quantized")
"""Tables that have their baselines as results of their own."""
FILES = {"quantized": "convergence_200.json", "equal_time": "convergence_88.json"}
"""Tables whose runs are longer; the others are in convergence.json."""
EQUAL_TIME = (
    *("direct", "direct_12", "direct_8", "direct_8_two_updates"),
    *("two_stage_pruned", "lean_96", "lean_48", "lean_48_keep_8", "lean_48_keep_8_two_updates"),
)
DIRECT_ITERATIONS = (10, 15, 20, 30, 37)
"""Columns: the charged time of so many iterations of `direct`."""
HEADLINE = ("direct_8", "lean_48_keep_8", "lean_48", "two_stage_pruned", "two_stage_fp8", "two_stage_nvfp4")
CHARGED = {"flux1_dev": "FLUX.1-dev", "sd35_large": "SD3.5-Large"}
HEADLINE_SHARE = 0.9
PUBLISHED = json.loads((ROOT / "benchmarks" / "published.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def unmeasured(name: str, what: str = "Not measured yet") -> str:
    return f"{what}: `{COMMANDS[name]}`"


def read(results: Path, name: str) -> Any:
    """Content of a results file; None if it is not there."""
    file = results / name
    return json.loads(file.read_text()) if file.is_file() else None


def rollouts(results: Path) -> str:
    rows = []
    for model, title in TITLES.items():
        for scope in SCOPES:
            found = read(results, "_".join(["rollout", model, *scope.split()]) + ".json")
            if found is None:
                continue
            naive, both = found["seconds"]["naive"], found["two_stage"]
            paper = "" if scope else f"{PUBLISHED['rollout_speed'][model]:.2f} ×"
            said = [title, *(words for words in ("all blocks", "small decoder") if words in scope)]
            said += [] if "decoder_compiled" in found else ["decoding not compiled"]
            said += [f"on an {card(found)}"] if card(found) != PAGES_CARD else []
            cells = f"{naive:.1f}", f"{both:.1f}", f"{found['ratio']:.2f} ×", paper
            rows.append([", ".join(said), *cells, a_step(found, "naive"), a_step(found, "previews")])
            for name, one in found.get("pruned", {}).items():
                after, keep, micro_batch = map(int, name.split(":"))
                cells = f"{naive:.1f}", f"{one['seconds']:.1f}", f"{one['ratio']:.2f} ×", ""
                part = f"previews, pruned after {after} to {keep}, micro-batch {micro_batch}"
                step = a_step(found, part, after, keep)
                rows.append([", ".join([*said, f"pruned to {keep}"]), *cells, a_step(found, "naive"), step])
    sides = ["24 of 96 in bfloat16", "in two stages, FP8", "ratio", "paper's ratio"]
    return table(["rollout of one prompt, s", *sides, "a step in bfloat16, ms", "in FP8, ms"], rows)


def card(found: dict[str, Any]) -> str:
    """As the page calls it, of `NVIDIA H100 80GB HBM3 (sm_90)`: H100."""
    return str(found["gpu"]).removeprefix("NVIDIA ").split()[0]


def a_step(found: dict[str, Any], part: str, after: int = 0, keep: int = 0) -> str:
    """Milliseconds of a solver step of one image: `part` of a rollout, less decoding and scoring."""
    seconds, pool = found["seconds"], 96
    decoded = seconds.get(f"decode, score: {part.partition(',')[0]}")
    if decoded is None:
        return ""
    steps = pool * (10 if part == "naive" else 6)
    if keep:
        steps, decoded = pool * after + keep * (6 - after), decoded * (pool + keep) / pool
    return f"{1000 * (seconds[part] - decoded) / steps:.1f}"


def iterations(results: Path) -> str:
    """Of one prompt, by schedule, from `iteration.py`."""
    rows, missing = [], []
    for model, title in TITLES.items():
        found = read(results, f"iteration_{model}.json")
        if found is None:
            missing.append(f"`python benchmarks/iteration.py {model}`")
            continue
        small = read(results, f"iteration_{model}_small_decoder.json")
        for name, seconds in found["seconds"].items():
            rows.append([f"{title}: {name}", *stages_of(seconds, found["total"], name)])
        if small:
            for name in ("fair", "ours"):
                cells = stages_of(small["seconds"][name], small["total"], name)[:-1]
                times = f"{small['total'][name] / found['total']['ours']:.2f} ×"
                other = f", its rollout on an {card(small)}" if card(small) != PAGES_CARD else ""
                rows.append([f"{title}: {name}, in the run with a small decoder{other}", *cells, times])
    made = table(["one prompt, s", "explore", "regenerate", "learn", "together", "times ours"], rows)
    return made + (f"\n\nNot measured yet: {', '.join(missing)}" if missing else "")


def stages_of(seconds: dict[str, float], total: dict[str, float], name: str) -> list[str]:
    cells = [f"{seconds[stage]:.1f}" for stage in ("explore", "regenerate", "learn")]
    return [*cells, f"{total[name]:.1f}", f"{total[name] / total['ours']:.2f} ×"]


def schedules(results: Path) -> str:
    rows = []
    for (file, variant), title in SCHEDULES.items():
        (row,) = (row for row in read(results, file)["rows"] if row["variant"] == variant)
        seconds = row["seconds"]
        rows.append([title, *(f"{seconds[part]:.1f}" for part in PARTS), f"**{seconds['total']:.1f}**"])
    return table(["schedule, s", *PARTS, "iteration"], rows)


def loops(results: Path) -> str:
    rows = []
    for name, title in LOOPS.items():
        found = read(results, f"full_iteration_{name}.json")
        seconds = found["iterations"][-1]["seconds"]
        stages = [f"{seconds[stage]:.1f}" for stage in ("explore", "regenerate", "learn", "publish", "total")]
        rows.append([title, str(found["prompts"]), *stages, f"{found['peak_memory_gb']:.0f}"])
    stages = ["explore", "regenerate", "learn", "publish", "whole iteration"]
    return table(["whole loop, s", "prompts", *stages, "peak memory, GB"], rows)


def gpus(results: Path) -> str:
    """Whole iterations on one host, from `many_gpus.py`: full depth."""
    found, missing = whole_iterations(results), []
    if {row["gpus"] for row in found} < {1, 2}:
        missing = [unmeasured("gpus", "Not all measured yet" if found else "Not measured yet")]
    rows = []
    for row in found:
        seconds, planned = row["seconds"], row["planned"]
        cells = [TITLES[row["model"]], row["device"].removeprefix("NVIDIA "), str(row["gpus"])]
        cells += [placed(row), str(row["prompts"])]
        cells += [f"{seconds[stage]:.1f}" for stage in ("explore", "regenerate", "learn", "publish")]
        cells += [f"**{seconds['total']:.1f}**", off(planned["seconds"], seconds["total"])]
        cells += [f"{max(row['peak_gb']):.0f}" if row["peak_gb"] else "", f"{max(planned['peak_gb']):.0f}"]
        cells.append(" / ".join(f"{share:.0%}" for share in row["busy"]))
        rows.append([*cells, f"{row['seconds_48_prompts']:.0f}" if row["seconds_48_prompts"] else ""])
    stages = ["explore", "regenerate", "learn", "publish", "iteration"]
    memory = ["peak memory, GB", "planned"]
    header = ["s", "GPU", "GPUs", "placement", "prompts", *stages, "planned", *memory, "busy", "48 prompts, computed"]
    shown = [table(header, rows)] if rows else []
    reduced = {(row["model"], row["gpus"]): row for row in found if "all_reduce" in row}
    return "\n\n".join([*shown, *missing, *map(reduction, reduced.values())])


def whole_iterations(results: Path) -> list[dict[str, Any]]:
    """Rows of many_gpus.json of published depth, of nothing killed, and in which every explorer had work."""
    rows = read(results, "many_gpus.json") or []
    taken = [row for row in rows if not row["layers"] and not row["kill"] and not row["idle_explorers"]]
    return sorted(taken, key=lambda row: (list(TITLES).index(row["model"]), row["gpus"], placed(row), row["prompts"]))


def placed(row: dict[str, Any]) -> str:
    """Its placement, and what else is not as usual."""
    other = [f"staleness {row['staleness']}"] * (row["staleness"] > 0) + [f"ZeRO-{row['zero']}"] * (row["zero"] > 1)
    return ", ".join([row["placement"], *other])


def reduction(row: dict[str, Any]) -> str:
    return (
        f"{TITLES[row['model']]}, {row['gpus']} {row['device'].removeprefix('NVIDIA ')}: NCCL needs "
        f"{row['all_reduce'] * 1e3:.1f} ms to sum a LoRA gradient over the ranks."
    )


def hosts(results: Path) -> str:
    """What `solrl plan` says of the published iteration on hosts of several sizes, beside the paper's seconds."""
    planned, rows = read(results, "many_gpus_planned.json"), []
    if planned is None:
        return unmeasured("hosts", "Not planned yet")
    counts = sorted({row["gpus"] for row in planned})
    for model, paper in PUBLISHED["iteration_seconds"].items():
        seconds = {row["gpus"]: row["seconds"] for row in planned if row["model"] == model}
        rows.append([TITLES[model], *(f"{seconds[count]:.0f}" for count in counts), *map(str, paper)])
    ours = [f"{count} H100, planned" for count in counts]
    return table(["48 prompts, s", *ours, "8 B200, one stage (paper)", "two stages (paper)"], rows)


def off(planned: float, measured: float) -> str:
    return f"{planned:.1f} ({planned / measured - 1:+.0%})"


def placements(results: Path) -> str:
    """The same with few layers: placements, staleness and ZeRO stages; and what an explorer's death changes."""
    rows = []
    found = [row for row in read(results, "many_gpus.json") or [] if row["layers"]]
    for row in sorted(found, key=lambda row: (-row["layers"], row["kill"], placed(row))):
        ways = [row["placement"], f"staleness {row['staleness']}", f"ZeRO-{row['zero']}"]
        ways += ["an explorer killed"] if row["kill"] else []
        ways += ["`run.deterministic`"] if "run.deterministic=true" in row["set"] else []
        seconds = row["seconds"]
        cells = [", ".join(ways), str(row["layers"]), str(row["prompts"])]
        cells += [*(f"{seconds[part]:.1f}" for part in PARTS), f"**{seconds['total']:.1f}**"]
        busy = " / ".join(f"{share:.0%}" for share in row["busy"])
        rows.append([*cells, busy, *(row["digests"][of][:8] for of in ("selection", "lora"))])
    header = ["s", "blocks", "prompts", *PARTS, "iteration", "busy", "digest of the selection", "of the LoRA"]
    return table(header, rows) if rows else unmeasured("placements")


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
    return table(header, rows) + ("" if found else f"\n\n{unmeasured('ranking')}")


def perfect(side: int, seeds: int) -> tuple[float, float]:
    """Shares of the others that the `side` best and the `side` worst of a pool beat."""
    worst = (side - 1) / 2 / (seeds - 1)
    return 1 - worst, worst


def place(beaten: float, seeds: int) -> float:
    """The place of a seed that beats such a share of the others, from 1 for the worst, over the pool."""
    return (beaten * (seeds - 1) + 1) / seeds


def campaign(name: str) -> Callable[[Path], str]:
    """The block of a table of `variants.py`: what is measured of it, and the paper's HPSv2 if it has such a table."""

    def block(results: Path) -> str:
        content, paper = read(results, FILES.get(name, "convergence.json")), PUBLISHED.get(name, {})
        found = {} if content is None else content["comparisons"]
        own = found.keys() & set(TABLES[name])
        if name not in MAIN and own <= set(TABLES["convergence"]):  # nothing but its baselines
            found = {}
        rows = []
        for variant in TABLES[name]:
            if variant in found:
                rows.append(
                    [variant, *_measured(content, variant), f"{paper[variant]:.4f}" if variant in paper else ""]
                )
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
        said = [unmeasured(name, *some)] if missing else []
        shown = [table([header[i] for i in kept], ([row[i] for i in kept] for row in rows))] if rows else []
        return "\n\n".join(shown + said)

    return block


def _measured(content: Mapping[str, Any], variant: str) -> list[str]:
    found = content["comparisons"][variant]
    targets = found["targets"].values()
    steps = " / ".join("–" if t["iterations"] is None else f"{t['iterations']:.1f}" for t in targets)
    sooner = " / ".join(times(t["times_sooner"]["flux1_dev"]) for t in targets)
    of_seed = whole_runs(content)[variant].values()
    words = [run["words"]["ema"] for run in of_seed if run["words"]]
    held = plus_minus(*mean_with_interval(words)) if words else ""
    return [str(len(of_seed)), plus_minus(*found["final"]), held, steps, sooner]


def equal_time(results: Path) -> str:
    """Held-out reward after equal charged time, on a line between evaluations; longer runs have rows of their own."""
    content, longer = read(results, "convergence.json"), read(results, FILES["equal_time"])
    if content is None:
        return unmeasured("convergence")
    price = {name: charged["flux1_dev"] for name, charged in content["charged"].items()}
    found = [(name, runs) for name, runs in whole_runs(content).items() if name in EQUAL_TIME]
    if longer is not None:
        found += [(f"{name}, {longer['iterations']} iterations", runs) for name, runs in whole_runs(longer).items()]
    rows = []
    for title, runs in sorted(found, key=lambda row: EQUAL_TIME.index(row[0].partition(",")[0])):
        made, reward = together(runs)
        name, mean = title.partition(",")[0], reward.mean(axis=0)
        after = [count * price["direct"] / price[name] for count in DIRECT_ITERATIONS]
        cells = [f"{np.interp(each, made, mean):.3f}" if each <= made[-1] else "" for each in after]
        rows.append([title, str(len(runs)), f"{price[name]:.0f}", *cells])
    columns = [f"of {count}" for count in DIRECT_ITERATIONS]
    shown = table(["reward after the time", "seeds", "s an iteration", *columns], rows)
    return shown if longer else f"{shown}\n\n{unmeasured('equal_time', 'Longer runs are not measured yet')}"


def headline(results: Path) -> str:
    """How many times sooner two stages, or few seeds alone, have a share of the gain of the published one-stage
    strategies, in charged time. Longer runs of a variant are taken if there are as many: more of them have come so far.
    """
    content, longer = read(results, "convergence.json"), read(results, FILES["equal_time"])
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
    return f"Time to {share} of the other's gain:\n\n{table(header, rows)}"


def sooner(results: Path) -> str:
    """The paper's, then ours."""
    models = list(next(iter(PUBLISHED["times_sooner"].values())))
    rows = [[reward, *(f"{found[m]:.1f} ×" for m in models)] for reward, found in PUBLISHED["times_sooner"].items()]
    return f"{table(['paper', *models], rows)}\n\n{campaign('convergence')(results)}"


def rewards(results: Path) -> str:
    paper, ours = PUBLISHED["rewards"], read(results, "published_flux1_dev_published.json")
    rows = [[f"{name} (paper)", *(f"{value:.4f}" for value in values)] for name, values in paper["rows"].items()]
    if ours is not None:
        order = ("imagereward", "clipscore", "pickscore", "hpsv2")
        last = ours["rows"][-1]
        for name, scores in (("base", ours["base"]), (f"after {last['updates']} iterations", last["scores"])):
            rows.append([name, *(f"{scores[key][0]:.4f} ± {scores[key][1]:.4f}" for key in order)])
    return table(["FLUX.1", *paper["columns"]], rows) + ("" if ours else f"\n\n{unmeasured('rewards')}")


def reward_figure(results: Path) -> str:
    content = read(results, "convergence.json")
    if content is None or not content["comparisons"]:
        return f"*Held-out reward against GPU-hours.* {unmeasured('convergence')}"
    return "![Held-out reward against charged GPU-hours, by variant](images/results_reward.png)"


BLOCKS: dict[str, Callable[[Path], str]] = {
    "reward-figure": reward_figure,
    "headline": headline,
    "rollouts": rollouts,
    "iterations": iterations,
    "loops": loops,
    "gpus": gpus,
    "hosts": hosts,
    "placements": placements,
    "schedules": schedules,
    "fidelity": fidelity,
    "ranking": ranking,
    "sooner": sooner,
    "equal-time": equal_time,
    "rewards": rewards,
    **{name.replace("_", "-"): campaign(name) for name in TABLES if name != "convergence"},
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
