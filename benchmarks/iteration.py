"""What does a whole iteration cost, over the fair baseline and the released schedules? From what is measured.

    python benchmarks/rollout.py MODEL --work FOLDER --prune 2:36:12 --released     # on the GPU
    python benchmarks/learner.py MODEL                                              # on the GPU
    python benchmarks/iteration.py flux|sd3|sana [--small-decoder] [--results FOLDER]   # anywhere

Seconds of one prompt on one card, by stage, of four schedules:

    released             96 × 10 steps, not compiled; PEFT's three passes, not compiled, checkpointing as released
    released two-stage   96 previews × 6 steps in the tier, not compiled; 24 × 10 steps; the same learner
    fair                 96 × 10 steps in compiled bfloat16, decoded in batches; the compiled learner
    ours                 pruned previews and regeneration, compiled; the compiled learner

If the shipped learner computes activations again, `fair` and `ours` are also told with a learner that keeps all.

Both sides of a ratio come from one process: rollouts from rollout.py, learners from learner.py, whose eager side is the
released one (SD3.5-Large's base is bfloat16 here, float32 as released, which favours the released schedules). SD3.5-L's
and SANA's rollouts are those of `--all-blocks`. With `--small-decoder` they are those of `--preview-decoder` as well;
the released schedules are then of the other process, on the same card. What a whole loop adds (revisions, checkpoints,
waits) is in full_iteration.py's figures. Aims on one H200: see AIMS.

Prints a table; writes iteration_MODEL.json (iteration_MODEL_small_decoder.json) into the folder (default
benchmarks/results) with `seconds` by schedule and stage, `ratio_to_fair` and `ratio_to_released`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEEP = 24
TIMESTEPS = {"flux": 4, "sd3": 6, "sana": 6}
"""That a sample is trained on: `objective.timestep_fraction` of 10 steps."""
AIMS = {"flux": (1.5, 2.3), "sd3": (1.4, 2.0), "sana": (1.4, 2.4)}
"""Model → times of the fair baseline, of the released schedule."""
ROLLOUTS = {"flux": "rollout_flux", "sd3": "rollout_sd3_all_blocks", "sana": "rollout_sana_all_blocks"}
SMALL = "_small_decoder"
ALL_KEPT = "compiled, activation memory 1"
"""The learner's fastest side."""
STAGES = ("explore", "regenerate", "learn")


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def schedules(
    rollout: dict[str, Any], released: dict[str, float], learner: dict[str, Any], timesteps: int
) -> dict[str, dict[str, float]]:
    """Schedule → stage → seconds of one prompt. One-stage schedules sample all in the stage ``regenerate``."""
    passes = {side["side"]: side["milliseconds"]["sum"] / 1e3 for side in learner["sides"]}
    eager, compiled = (KEEP * timesteps * passes[name] for name in ("eager", learner["shipped"]))
    measured = rollout["seconds"]
    regenerate = measured["regeneration"]
    explore = min(one["seconds"] - regenerate for one in rollout["pruned"].values())
    found = {
        "released": {"explore": 0.0, "regenerate": released["naive"], "learn": eager},
        "released two-stage": {
            "explore": released["previews"],
            "regenerate": released["regeneration"],
            "learn": eager,
        },
        "fair": {"explore": 0.0, "regenerate": measured["naive"], "learn": compiled},
        "ours, not pruned": {"explore": measured["previews"], "regenerate": regenerate, "learn": compiled},
        "ours": {"explore": explore, "regenerate": regenerate, "learn": compiled},
    }
    if learner["shipped"] != ALL_KEPT:
        kept = {"learn": KEEP * timesteps * passes[ALL_KEPT]}
        found |= {f"{name}, all activations kept": found[name] | kept for name in ("fair", "ours")}
    return found


def composed(model: str, folder: Path, small_decoder: bool) -> dict[str, Any]:
    rollout = ROLLOUTS[model] + SMALL * small_decoder
    names = list(dict.fromkeys([rollout, ROLLOUTS[model], f"learner_{model}"]))
    files = {name: read(folder, name) for name in names}
    measured, learner = files[rollout], files[f"learner_{model}"]
    seconds = schedules(measured, files[ROLLOUTS[model]]["released"], learner, TIMESTEPS[model])
    total = {name: sum(stages.values()) for name, stages in seconds.items()}
    fair, released = AIMS[model]
    ours, baseline = (f"{name}, all activations kept" for name in ("ours", "fair"))
    kept = {}
    if ours in total:
        kept = {
            "ratio_to_fair_all_kept": total[baseline] / total[ours],
            "ratio_to_released_all_kept": total["released"] / total[ours],
        }
    return {
        "question": "seconds of one prompt's rollout and update on one card",
        "model": model,
        "gpu": measured["gpu"],
        "learner_gpu": learner["device"],
        "torch": measured["torch"],
        "tier": measured["tier"],
        "from": names,
        "seconds": seconds,
        "total": total,
        "rollout_ratio": measured["seconds"]["naive"] / (total["ours"] - seconds["ours"]["learn"]),
        "ratio_to_fair": total["fair"] / total["ours"],
        "ratio_to_released": total["released"] / total["ours"],
        "ratio_to_released_two_stage": total["released two-stage"] / total["ours"],
        "aim_to_fair": fair,
        "aim_to_released": released,
        **kept,
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| schedule | " + " | ".join(STAGES) + " | together |", "|---" * (len(STAGES) + 2) + "|"]
    for name, stages in result["seconds"].items():
        cells = " | ".join(f"{stages[stage]:.1f}" for stage in STAGES)
        lines.append(f"| {name} | {cells} | {result['total'][name]:.1f} |")
    lines.append(
        f"{result['model']}: {result['ratio_to_fair']:.2f} × fair (aim {result['aim_to_fair']}), "
        f"{result['ratio_to_released']:.2f} × released (aim {result['aim_to_released']}), "
        f"{result['ratio_to_released_two_stage']:.2f} × released two-stage"
    )
    if "ratio_to_fair_all_kept" in result:
        lines.append(
            f"{result['model']}, all activations kept: {result['ratio_to_fair_all_kept']:.2f} × fair, "
            f"{result['ratio_to_released_all_kept']:.2f} × released"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=AIMS)
    parser.add_argument("--small-decoder", action="store_true", help="previews with a small decoder")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    result = composed(arguments.model, arguments.results, arguments.small_decoder)
    file = arguments.results / f"iteration_{arguments.model}{SMALL * arguments.small_decoder}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
