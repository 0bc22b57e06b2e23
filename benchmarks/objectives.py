"""How far each objective raises the testbed's held-out reward: real runs of the shipped methods at the demo's sizes.

    python benchmarks/objectives.py [--iterations 12] [--methods sol_rl awm …] [--root runs/objectives]

Every run is `solrl train configs/demo.yaml configs/methods/METHOD.yaml` with the settings of `SAME` and `OWN` below:
the demo's sizes and its learning rate, which a small model needs; everything else is the method's published value. A
run that is there is gone on with. Prints the table of docs/objectives.md and writes its picture and JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from actors import commands
from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "objectives.json"
PICTURE = ROOT / "docs" / "images" / "objectives.png"
METHODS = ("sol_rl", "awm", "flow_grpo", "flow_grpo_fast", "dance_grpo")
SAME = (
    "rollout={prompts: 12, pool: 24, keep: 8}",
    "rollout.preview={micro_batch: 24, precision: nvfp4-emulated}",
    "rollout.full.micro_batch=8",
    "learner={micro_batch: 24, optimizer: {lr: 1e-3}}",
    "evaluation={every: 2, prompts: 64, samples: 4, steps: 10, pictures: 8}",
)
"""The demo's sizes and learning rate for every method."""
OWN: dict[str, tuple[str, ...]] = {"sol_rl": ("objective={timestep_fraction: 0.4, old_decay: {kind: copy}}",)}
"""As in the demo: the published decay would let the sampling policy lag behind a short run."""


def configured(method: str, iterations: int, root: Path) -> Config:
    files = [ROOT / "configs" / "demo.yaml", ROOT / "configs" / "methods" / f"{method}.yaml"]
    own = (f"run.name={method}", f"run.root='{root}'", f"run.iterations={iterations}", *OWN.get(method, ()))
    config = load(files, [*SAME, *own])
    check(config)
    return config


def curve(config: Config) -> dict[str, Any]:
    """Held-out reward by iterations done, and what the learner says of its ratios."""
    records = RunFolder.of(config).read_metrics()
    evaluated = sorted((r for r in records if r["event"] == "evaluation"), key=lambda r: r["iteration"])
    points = [r for r in evaluated if r["policy"] in ("base", "ema")]
    learned = [r for r in records if r["event"] == "iteration"]
    first, last = points[0], points[-1]
    gains = [sum(last["rewards"][p]) / len(last["rewards"][p]) - sum(v) / len(v) for p, v in first["rewards"].items()]
    mean = sum(gains) / len(gains)
    error = (sum((g - mean) ** 2 for g in gains) / (len(gains) - 1) / len(gains)) ** 0.5
    return {
        "iterations": [p["iteration"] for p in points],
        "reward": [p["reward_mean"] for p in points],
        "stderr": [p["reward_stderr"] for p in points],
        "gain": mean,
        "gain_stderr": error,
        "spearman": sum(r["spearman"] for r in learned) / len(learned),
        "first_ratio_deviation": max((r["first_ratio_deviation"] or 0.0 for r in learned), default=0.0),
        "clip_fraction": sum(r["clip_fraction"] or 0.0 for r in learned) / len(learned),
        "has_ratio": learned[0]["ratio_mean"] is not None,
        "seconds": sum(r["seconds"]["total"] for r in learned) / len(learned),
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
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--root", type=Path, default=Path("runs/objectives"))
    arguments = parser.parse_args()
    curves = {}
    for method in arguments.methods:
        config = configured(method, arguments.iterations, arguments.root)
        folder = RunFolder.of(config)
        if not (folder.path / "summary.json").exists():
            commands.train(config, live=False, resume=(folder.path / "config.yaml").exists())
        curves[method] = curve(config)
        show(curves)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(curves, indent=1) + "\n")
    draw(curves, PICTURE)


if __name__ == "__main__":
    main()
