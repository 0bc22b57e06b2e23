"""How far each objective raises the testbed's held-out reward: real runs of the shipped methods at the demo's sizes.

    python benchmarks/objectives.py [--only sol_rl awm …] [--iterations 16] [--at-once 5] [--seconds 480] [--gpu]
                                    [--set KEY=VALUE …] [--root runs/objectives]

Every run is `solrl train configs/demo.yaml configs/methods/METHOD.yaml` with the settings of `SAME` and `OWN` below
and `--set`: the demo's sizes and a learning rate for a small model and few updates; everything else is the method's
published value. `--at-once` runs train side by side, each on a Ray of its own. After `--seconds` what still trains is
stopped. A run that is there is gone on with, so the same command completes it, and `--only` adds a method to the
others' results.

Prints the table of docs/reference/objectives.md; writes its picture, and its numbers into
benchmarks/results/objectives.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from campaign import ON_ONE_GPU, REPOSITORY, Job, train_all

from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.storage.run_folder import RunFolder

RESULTS = REPOSITORY / "benchmarks" / "results" / "objectives.json"
PICTURE = REPOSITORY / "docs" / "images" / "objectives.png"
METHODS = ("sol_rl", "awm", "flow_grpo", "flow_grpo_fast", "dance_grpo")
SAME = (
    "rollout={prompts: 12, pool: 24, keep: 8}",
    "rollout.explore={micro_batch: 24, precision: nvfp4-emulated}",
    "rollout.preview.prune=null",
    "rollout.regenerate.micro_batch=8",
    "learner={micro_batch: 24, optimizer: {lr: 1e-3}}",
    "evaluation={every: 4, prompts: 64, samples: 4, steps: 10, pictures: 8}",
)
"""The demo's sizes and learning rate for every method."""
OWN: dict[str, tuple[str, ...]] = {
    "sol_rl": ("objective={timestep_fraction: 0.4, old_decay: {kind: copy}}",),
    "dance_grpo": ("learner.updates=3",),
}
"""What else a method needs in a short run. As in the demo: with the published decay `old` would lag behind. DanceGRPO
is published with one optimiser step an iteration and, for 16 GPUs, with three."""


def job(method: str, arguments: argparse.Namespace) -> Job:
    root = arguments.root.absolute()
    own = (f"run.name={method}", f"run.root='{root}'", f"run.iterations={arguments.iterations}", *OWN.get(method, ()))
    return Job(
        (REPOSITORY / "configs" / "demo.yaml", REPOSITORY / "configs" / "methods" / f"{method}.yaml"),
        (*SAME, *own, *(ON_ONE_GPU if arguments.gpu else ()), *arguments.set),
    )


def curve(config: Config) -> dict[str, Any] | None:
    """Held-out reward by iterations done, and what the learner says of its ratios; None before the second point."""
    folder = RunFolder.of(config)
    records = folder.read_metrics() if folder.begun else []
    evaluated = sorted((r for r in records if isinstance(r, EvaluationMetrics)), key=lambda r: r.iteration)
    points = [r for r in evaluated if r.policy in ("base", "ema")]
    learned = [r for r in records if isinstance(r, IterationMetrics)]
    if len(points) < 2:
        print(f"{config.run.name} has no second evaluation yet", flush=True)
        return None
    first, last = points[0], points[-1]
    gains = [sum(last.rewards[p]) / len(last.rewards[p]) - sum(v) / len(v) for p, v in first.rewards.items()]
    mean = sum(gains) / len(gains)
    error = (sum((g - mean) ** 2 for g in gains) / (len(gains) - 1) / len(gains)) ** 0.5
    return {
        "iterations": [p.iteration for p in points],
        "reward": [p.reward_mean for p in points],
        "stderr": [p.reward_stderr for p in points],
        "gain": mean,
        "gain_stderr": error,
        "spearman": sum(r.spearman or 0.0 for r in learned) / len(learned),
        "first_ratio_deviation": max((r.first_ratio_deviation or 0.0 for r in learned), default=0.0),
        "clip_fraction": sum(r.clip_fraction or 0.0 for r in learned) / len(learned),
        "has_ratio": learned[0].ratio_mean is not None,
        "seconds": sum(r.seconds["total"] for r in learned) / len(learned),
    }


def show(curves: dict[str, dict[str, Any]]) -> None:
    print("| method | iterations | before | after | gain (paired, ± s.e.) | Spearman | clipped | s/iteration |")
    print("|---|---|---|---|---|---|---|---|")
    for method, c in curves.items():
        clipped = f"{c['clip_fraction']:.3f}" if c["has_ratio"] else "–"
        print(
            f"| {method} | {c['iterations'][-1]} | {c['reward'][0]:.4f} | {c['reward'][-1]:.4f} "
            f"| {c['gain']:+.4f} ± {c['gain_stderr']:.4f} | {c['spearman']:.3f} | {clipped} | {c['seconds']:.1f} |"
        )


def draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for method, c in curves.items():
        axes.errorbar(c["iterations"], c["reward"], yerr=c["stderr"], label=method, capsize=2, marker="o", markersize=3)
    axes.set_xlabel("iterations")
    axes.set_ylabel("held-out reward (CLIPScore of the testbed)")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs side by side; each wants three cores")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop what still trains after so long")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run of this call")
    parser.add_argument("--root", type=Path, default=Path("runs/objectives"))
    arguments = parser.parse_args()
    jobs = {method: job(method, arguments) for method in arguments.only}
    configs = {method: job.config for method, job in jobs.items()}  # bad input before anything starts
    train_all(list(jobs.values()), at_once=arguments.at_once, seconds=arguments.seconds)
    curves = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for method, config in configs.items():
        found = curve(config)
        if found is not None:
            lr, updates = config.learner.optimizer.lr, config.learner.updates
            curves[method] = found | {"lr": lr, "updates": updates, "set": arguments.set, "gpu": arguments.gpu}
    if not curves:
        sys.exit("no method has a second evaluation yet")
    curves = {method: curves[method] for method in METHODS if method in curves}
    show(curves)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(curves, indent=1) + "\n")
    draw(curves, PICTURE)


if __name__ == "__main__":
    main()
