"""Tables of the results page: seconds of rollouts and of whole iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import CONFIGS, MODELS, SOL_RL
from page_tables import OTHERS, PUBLISHED, TITLES, read, table, unmeasured

from solrl_ray.config.loading import load

SCOPES = ("", "small decoder", "all blocks", "all blocks small decoder")
"""Ends of the results files' names, as words."""
PAGES_CARD = "H200"
"""On which rollouts are, if their row says nothing else."""


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


def gpus(results: Path) -> str:
    """Whole iterations on one host, from `many_gpus.py`: full depth."""
    found, missing = whole_iterations(results), []
    if {row["gpus"] for row in found} < {1, 2}:
        missing = [unmeasured("gpus", "Not all measured yet" if found else "Not measured yet")]
    rows = []
    for row in found:
        seconds, planned = row["seconds"], row["planned"]
        cells = [(TITLES | OTHERS)[row["model"]], row["device"].removeprefix("NVIDIA "), str(row["gpus"])]
        cells += [placed(row), str(row["prompts"]), seeds(row)]
        cells += [f"{seconds[stage]:.1f}" for stage in ("explore", "regenerate", "learn", "publish")]
        cells += [f"**{seconds['total']:.1f}**", off(planned["seconds"], seconds["total"]) if planned else "–"]
        cells += [
            f"{max(row['peak_gb']):.0f}" if row["peak_gb"] else "",
            f"{max(planned['peak_gb']):.0f}" if planned else "–",
        ]
        cells.append(" / ".join(f"{share:.0%}" for share in row["busy"] or ()))
        rows.append([*cells, f"{row['seconds_48_prompts']:.0f}" if row["seconds_48_prompts"] else ""])
    stages = ["explore", "regenerate", "learn", "publish", "iteration"]
    memory = ["peak memory, GB", "planned"]
    what = ["s", "GPU", "GPUs", "placement", "prompts", "seeds"]
    header = [*what, *stages, "planned", *memory, "busy", "48 prompts, computed"]
    shown = [table(header, rows)] if rows else []
    return "\n\n".join([*shown, *missing])


def whole_iterations(results: Path) -> list[dict[str, Any]]:
    """Rows of many_gpus.json of published depth in which every explorer had work."""
    rows = read(results, "many_gpus.json") or []
    taken = [row for row in rows if not row["layers"] and not row["idle_explorers"]]
    models = [*TITLES, *OTHERS]
    return sorted(taken, key=lambda row: (models.index(row["model"]), row["gpus"], placed(row), row["prompts"]))


def placed(row: dict[str, Any]) -> str:
    """Its placement, and what else is not as usual."""
    other = [f"staleness {row['staleness']}"] * (row["staleness"] > 0) + [f"ZeRO-{row.get('zero')}"] * (
        row.get("zero", 1) > 1
    )
    said = [f"`{each}`" for each in row["set"] if each.startswith(("learner.", "model."))]
    return ", ".join([row["placement"], *other, *said])


def seeds(row: dict[str, Any]) -> str:
    """How many of a prompt's seeds are kept, in words."""
    needed = ["prompts={train: unused, heldout: unused}", "rewards=[{kind: clipscore}]"]
    rollout = load([SOL_RL, CONFIGS / "models" / MODELS[row["model"]]], [*needed, *row["set"]]).rollout
    return f"{rollout.keep} of {rollout.pool}"


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
