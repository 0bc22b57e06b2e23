"""Seconds of one prompt's rollout and update on one card, by stage, of several schedules, from what `rollout.py` and
`learner.py` measured.

    released             96 × 10 steps, not compiled; PEFT's three passes, not compiled, checkpointing as released
    released two-stage   96 previews × 6 steps in the tier, not compiled; 24 × 10 steps; the same learner
    fair                 96 × 10 steps in compiled bfloat16, decoded in batches; the compiled learner
    ours                 pruned previews and regeneration, compiled; the compiled learner

If the shipped learner computes activations again, `fair` and `ours` are also told with a learner that keeps all.

Both sides of a ratio come from one process: rollouts from rollout.py (`--prune 2:36:12 --released`), learners from
learner.py, whose eager side is the released one (SD3.5-Large's base is bfloat16 here, float32 as released, which
favours the released schedules). SD3.5-L's and SANA's rollouts are those of `--all-blocks`. With a small decoder they
are those of `--preview-decoder` as well; the released schedules are then of the other process, on the same card. What
a whole loop adds (revisions, checkpoints, waits) is in many_gpus.py's figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page_tables import read

KEEP = 24
TIMESTEPS = {"flux": 4, "sd3": 6, "sana": 6}
"""That a sample is trained on: `objective.timestep_fraction` of 10 steps."""
ROLLOUTS = {"flux": "rollout_flux", "sd3": "rollout_sd3_all_blocks", "sana": "rollout_sana_all_blocks"}
ALL_KEPT = "compiled, activation memory 1"
"""The learner's fastest side."""


def by_schedule(results: Path, model: str, *, small_decoder: bool = False) -> dict[str, Any] | None:
    """``seconds``, schedule → stage → seconds; their sums, ``total``; and the ``gpu`` of the rollout. One-stage
    schedules sample all in the stage ``regenerate``. None if something was not measured.
    """
    rollout = read(results, f"{ROLLOUTS[model]}{'_small_decoder' * small_decoder}.json")
    without, learner = read(results, f"{ROLLOUTS[model]}.json"), read(results, f"learner_{model}.json")
    if rollout is None or without is None or learner is None:
        return None
    seconds = schedules(rollout, without["released"], learner, TIMESTEPS[model])
    total = {name: sum(stages.values()) for name, stages in seconds.items()}
    return {"seconds": seconds, "total": total, "gpu": rollout["gpu"]}


def schedules(
    rollout: dict[str, Any], released: dict[str, float], learner: dict[str, Any], timesteps: int
) -> dict[str, dict[str, float]]:
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
