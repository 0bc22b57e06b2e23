"""Why does a choice of seeds pay? Signal and noise of a group's gradient, by chosen samples and pool.

    python benchmarks/gradient_noise.py [--prompts 16] [--repeats 4] [--at-once 2] [--seconds 600] [--gpu]

Runs of the testbed whose learning rate is next to nothing, so that their policy stands still: each iteration is one
measurement, of one optimiser step's gradient by DiffusionNFT, with `--prompts` groups. All shapes have the same
prompts. A run notes what every run does (`learning.noise_scale`): an unbiased estimate of the squared norm of the
gradient without noise, and the variance of one group's gradient. The policies are the base and one that is part of the
way, which is trained here first. A begun run goes on where it was, so several short calls add up.

Prints and writes benchmarks/results/gradient_noise.json: by policy and shape `signal` and `noise` of each iteration,
their ratio a group with its standard error (a jackknife over iterations), and charged seconds of a group without an
iteration's fixed cost, FLUX.1-dev on an H200.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from campaign import ON_ONE_GPU, REPOSITORY, Job, train_all
from common import CONFIGS
from shape_results import HEADLINE, Shape

from solrl_ray.report.curve import Curve
from solrl_ray.report.data import read_run
from solrl_ray.storage.run_folder import RunFolder

RESULTS = REPOSITORY / "benchmarks" / "results" / "gradient_noise.json"
CHOSEN, POOLS = (4, 8, 24), (0, 48, 96)
STANDS_STILL = 1e-12
"""Learning rate."""
TRAINING, TRAINED_FOR, PART = Shape(1, 4, 48, 3), 32, "part of the way"
"""How the second policy is made."""
POLICIES = ("base", PART)


def job(name: str, shape: Shape, arguments: argparse.Namespace, *settings: str) -> Job:
    tier = ON_ONE_GPU if arguments.gpu else ("rollout.explore.precision=nvfp4-emulated",) if shape.pool else ()
    run = f"run={{name: {name}, root: '{arguments.root.absolute()}'}}"
    files = (CONFIGS / "demo.yaml", CONFIGS / "methods" / "diffusion_nft.yaml")
    return Job(files, (*shape.settings, *shape.larger_batches, *tier, run, *settings))


def training(arguments: argparse.Namespace) -> Job:
    held_out = "evaluation={every: 8, prompts: 32, samples: 2, pictures: 0, reference: ''}"
    return job("part", TRAINING, arguments, "learner.optimizer.lr=1e-3", held_out, f"run.iterations={TRAINED_FOR}")


def measuring(policy: str, chosen: int, pool: int, arguments: argparse.Namespace) -> Job:
    start = f"run.init='{RunFolder.of(training(arguments).config).path}'" if policy == PART else "run.init=''"
    return job(
        f"{policy.replace(' ', '_')}_{chosen}of{pool or chosen}",
        Shape(arguments.prompts, chosen, pool, 1),
        arguments,
        f"learner={{micro_batch: {chosen}, optimizer: {{lr: {STANDS_STILL}}}}}",  # a micro-batch is a group
        "evaluation={prompts: 1, samples: 1, pictures: 0, reference: ''}",
        f"run.iterations={arguments.repeats}",
        start,
    )


def seconds_a_group(chosen: int, pool: int) -> float:
    """Charged, without an iteration's fixed cost."""
    few, many = (Shape(prompts, chosen, pool, 1).charged(HEADLINE) for prompts in (4, 12))
    return (many - few) / (12 - 4)


def signal_over_noise(signal: Sequence[float], noise: Sequence[float]) -> tuple[float, float]:
    """Ratio of the means, and its standard error by a jackknife; nan with one measurement."""
    s, n = np.array(signal), np.array(noise)
    left_out = (s.sum() - s) / (n.sum() - n) if len(s) > 1 else np.full(1, math.nan)
    spread = float(np.square(left_out - left_out.mean()).sum()) * (len(s) - 1) / len(s)
    return float(s.sum() / n.sum()), math.sqrt(spread)


def measured(each: Job, chosen: int, pool: int) -> dict[str, Any] | None:
    """None before the first iteration."""
    folder = RunFolder.of(each.config)
    done = read_run(folder.path).iterations if folder.begun else ()
    pairs = [(one.gradient_signal, one.gradient_noise) for one in done]
    if not pairs:
        return None
    signal, noise = (list(values) for values in zip(*pairs, strict=True))
    ratio, error = signal_over_noise(signal, noise)
    seconds = seconds_a_group(chosen, pool)
    return {"signal": signal, "noise": noise, "ratio": ratio, "stderr": error, "seconds": seconds}


def show(results: Mapping[str, Any]) -> None:
    print("| policy | shape | iterations | signal over noise of a group ± | s a group | the same a 1,000 s |")
    print("|---|---|---|---|---|---|")
    for policy, rows in results["policies"].items():
        for shape, row in rows.items():
            cells = f"{row['ratio']:.4f} ± {row['stderr']:.4f} | {row['seconds']:.2f}"
            print(f"| {policy} | {shape} | {len(row['signal'])} | {cells} | {1000 * row['ratio'] / row['seconds']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="groups of a measurement")
    parser.add_argument("--repeats", type=int, default=4, help="measurements of each shape")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, metavar="NAME")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop what still runs after so long")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--root", type=Path, default=Path("runs/gradient_noise"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"policies": {}}
    if arguments.results.exists():
        results = json.loads(arguments.results.read_text())
    if PART in arguments.policies:
        train_all([training(arguments)], at_once=1, seconds=arguments.seconds)
    shapes = [(chosen, pool) for pool in POOLS for chosen in CHOSEN]
    for policy in arguments.policies:
        jobs = {shape: measuring(policy, *shape, arguments) for shape in shapes}
        train_all(list(jobs.values()), at_once=arguments.at_once, seconds=arguments.seconds)
        rows = {Shape(1, *shape, 1).name[4:]: measured(each, *shape) for shape, each in jobs.items()}
        results["policies"][policy] = {name: row for name, row in rows.items() if row is not None}
    curve = Curve.of(read_run(RunFolder.of(training(arguments).config).path)) if PART in arguments.policies else None
    results |= {"prompts": arguments.prompts, "reward": curve.points[-1].reward} if curve else {}
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
