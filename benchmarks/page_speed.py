"""Tables of results/speed.md: seconds of rollouts and of whole iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page_tables import OTHERS, PUBLISHED, TITLES, read, table, unmeasured

SCOPES = ("", "small decoder", "all blocks", "all blocks small decoder")
"""Suffixes of the results files' names."""
PAGES_GPU = "H200"
"""The GPU of rows without a GPU name."""


def rollouts(results: Path) -> str:
    rows = []
    for model, title in TITLES.items():
        for scope in SCOPES:
            found = read(results, "_".join(["rollout", model, *scope.split()]) + ".json")
            if found is None:
                continue
            one_stage, paper = found["seconds"]["naive"], "" if scope else f"{PUBLISHED['rollout_speed'][model]:.2f}×"
            label = [title, *(words for words in ("all blocks", "small decoder") if words in scope)]
            label += [] if "decoder_compiled" in found else ["decoder not compiled"]
            label += [f"on an {gpu(found)}"] if gpu(found) != PAGES_GPU else []
            cells = f"{one_stage:.1f}", f"{found['two_stage']:.1f}", f"{found['ratio']:.2f}×", paper
            rows.append([", ".join(label), *cells, a_step(found, "naive"), a_step(found, "previews")])
            for name, one in found.get("pruned", {}).items():
                after, keep, micro_batch = map(int, name.split(":"))
                cells = f"{one_stage:.1f}", f"{one['seconds']:.1f}", f"{one['ratio']:.2f}×", ""
                part = f"previews, pruned after {after} to {keep}, micro-batch {micro_batch}"
                step = a_step(found, part, after, keep)
                rows.append([", ".join([*label, f"pruned to {keep}"]), *cells, a_step(found, "naive"), step])
    times = ["one stage, BF16, s", "two stages, FP8, s", "speed-up", "paper", "step in BF16, ms", "step in FP8, ms"]
    return table(["rollout of one prompt", *times], rows)


def gpu(found: dict[str, Any]) -> str:
    """Short name of the GPU: `H100` for `NVIDIA H100 80GB HBM3 (sm_90)`."""
    return str(found["gpu"]).removeprefix("NVIDIA ").split()[0]


def a_step(found: dict[str, Any], part: str, after: int = 0, keep: int = 0) -> str:
    """Milliseconds per solver step and image in `part` of a rollout, without decoding and scoring."""
    seconds, pool = found["seconds"], 96
    decoded = seconds.get(f"decode, score: {part.partition(',')[0]}")
    if decoded is None:
        return ""
    steps = pool * (10 if part == "naive" else 6)
    if keep:
        steps, decoded = pool * after + keep * (6 - after), decoded * (pool + keep) / pool
    return f"{1000 * (seconds[part] - decoded) / steps:.1f}"


def gpus(results: Path) -> str:
    """Whole iterations on one host at full depth, from `many_gpus.py`."""
    rows = []
    for row in whole_iterations(results):
        taken, planned, peak = row["seconds"], row["planned"], row["peak_gb"]
        device = row["device"].removeprefix("NVIDIA ").split()[0]
        cells = [(TITLES | OTHERS)[row["model"]], f"{row['gpus']} × {device}{settings(row)}", str(row["prompts"])]
        cells += [f"{taken[stage]:.1f}" for stage in ("explore", "regenerate", "learn", "publish")]
        cells += [f"**{taken['total']:.1f}**", off(planned["seconds"], taken["total"]) if planned else "–"]
        cells += [f"{max(peak):.0f}" if peak else "", f"{max(planned['peak_gb']):.0f}" if planned else "–"]
        rows.append([*cells, " / ".join(f"{share:.0%}" for share in row["busy"] or ())])
    stages = ["explore, s", "regenerate", "learn", "publish", "iteration"]
    header = ["model", "GPUs", "prompts", *stages, "planned", "peak, GB", "planned", "GPU busy"]
    return table(header, rows) if rows else unmeasured("gpus")


def whole_iterations(results: Path) -> list[dict[str, Any]]:
    """Rows of many_gpus.json at published depth in which every explorer had work."""
    rows = read(results, "many_gpus.json") or []
    taken = [row for row in rows if not row["layers"] and not row["idle_explorers"]]
    models = [*TITLES, *OTHERS]
    return sorted(taken, key=lambda row: (models.index(row["model"]), row["gpus"], settings(row), row["prompts"]))


def settings(row: dict[str, Any]) -> str:
    """Placement and settings that differ from the usual ones."""
    extras = ["split"] * (row["placement"] == "split") + [f"ZeRO-{row.get('zero')}"] * (row.get("zero", 1) > 1)
    extras += [f"`{text}`" for text in row["set"] if text.startswith(("learner.", "model."))]
    return "".join(f", {each}" for each in extras)


def hosts(results: Path) -> str:
    """Planned seconds of the published iteration for several numbers of GPUs, compared with the paper's."""
    planned, rows = read(results, "many_gpus_planned.json"), []
    if planned is None:
        return unmeasured("hosts", "Not planned yet")
    counts = sorted({row["gpus"] for row in planned})
    for model, paper in PUBLISHED["iteration_seconds"].items():
        seconds = {row["gpus"]: row["seconds"] for row in planned if row["model"] == model}
        rows.append([TITLES[model], *(f"{seconds[count]:.0f}" for count in counts), *map(str, paper)])
    ours = [f"{count} × H100, planned" for count in counts]
    return table(["48 prompts, s", *ours, "8 B200, one stage (paper)", "8 B200, two stages (paper)"], rows)


def off(planned: float, measured: float) -> str:
    return f"{planned:.1f} ({planned / measured - 1:+.0%})"
