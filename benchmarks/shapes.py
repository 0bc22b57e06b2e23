"""Which rollout setting reaches a good model fastest? Compares prompts per optimiser step, samples, pool and steps.

    python benchmarks/shapes.py --gpu [--gpus 4] --at-once 16 --seconds 480 [--stage screen] [--mps]
    python benchmarks/shapes.py --gpu --mps --at-once 16 --seeds 42 43 --runs 1x3_2of16+kl_0_2of7@5e-4
    python benchmarks/shapes.py --show
    python benchmarks/shapes.py --tiny --seconds 300 --root /tmp/shapes --results /tmp/shapes.json   # on a CPU: a trial

Trains on the testbed, one process per run (`one_process.py`), with DiffusionNFT and `old_decay: copy`. A setting
consists of

    prompts    per optimiser step: 1, 2, 4, 12
    chosen     samples of each prompt that are trained on: 2, 4, 8, 24
    pool       none (one stage: trains on all samples), or 8 to 96 seeds with pruned FP8 previews (two stages)
    steps      optimiser steps per iteration: 1, 3, 6; an iteration has prompts × steps prompts

The time of a run is *simulated GPU time*: the seconds that `solrl plan` forecasts for an iteration with this setting,
including fixed costs, for FLUX.1-dev on an H200 (`charged` in the results). A run ends when its held-out reward has
closed 95 % of the gap between base model and real images, or when its simulated time is over. In the first two search
stages it also ends if it has not closed 75 % after `NEAR` times the time of the fastest run of its side. A side is all
settings with one stage, or all with two. The search is the same for both sides; each search stage follows from the
results so far:

    screen     every setting, one seed, the first learning rate
    rates      settings that closed 75 % within `NEAR` times the best time of their side: the other learning rates
    seeds      the best `FRONT` of each side at their best rate, and the reference 24 of 24 with 12 prompts: five seeds

Search stages follow each other until the time is over. `--stage` runs only one of them, `--shapes` with the named
settings; a name may end with one of `OPTIONS`, such as 1x3_4of24+kl_0.

For GPUs that are available for minutes: `--seconds` stops all runs and keeps their curves so far. The same command
continues: runs resume from their folders, or start again if these are gone; finished runs of the results file are not
trained again. `--mps` starts NVIDIA's MPS, with which several processes share a GPU.

Prints all settings, fastest first, and writes benchmarks/results/shapes.json: `runs` by setting, rate and seed,
`charged`, `seconds_to` by setting and share, `rates` (each setting's best), `best`, `seconds_to_90`,
`two_stage_over_one_stage` and `over_24_of_24`. The last two are [ratio, low, high] of a bootstrap over seeds, and lower
bounds if some of the other runs never reached the share, as these count with their total time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaign import ON_ONE_GPU, REPOSITORY, Job, train_all
from common import CONFIGS
from shape_results import (
    CHARGED_LIMIT,
    FRONT,
    HEADLINE,
    MAP,
    NEAR,
    RATES,
    REFERENCE,
    SEEDS,
    SHAPES,
    SHARES,
    Pace,
    Runs,
    Shape,
    best_rate,
    ranked,
    show,
    summary,
    target,
)

from solrl_ray.report.curve import Curve
from solrl_ray.report.data import read_run
from solrl_ray.storage.run_folder import RunFolder

RESULTS = REPOSITORY / "benchmarks" / "results" / "shapes.json"
MOST_ITERATIONS = 600
"""Maximum iterations of a run: with the smallest iterations a run would take too many to use up its simulated time."""
EVALUATE_SECONDS = 100.0
"""Simulated seconds between evaluations."""
EMULATED = ("rollout.explore.precision=nvfp4-emulated",)
"""Settings for a CPU, which has no FP8."""
TINY_LIMIT = 30.0
TINY = (Shape(1, 4, 0, 1).name, Shape(2, 4, 48, 1).name)
STAGES = ("screen", "rates", "seeds")
SAVE_SECONDS = 60.0
"""Seconds between writes of the results file while runs train, in case the machine disappears."""
INNERMOST = re.compile(r"\[[^][{}]*\]|\{[^][{}]*\}")
"""Lists and objects of plain values; the results file has each on one line."""


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a run."""

    shape: str
    rate: float
    seed: int

    def has_ended(self, results: dict[str, Any]) -> bool:
        found = results["runs"].get(self.shape, {}).get(f"{self.rate:g}", {}).get(str(self.seed), {})
        return bool(found.get("ended"))

    def keep(self, results: dict[str, Any], run: dict[str, Any]) -> None:
        """Store the run's curve in `results`, unless the stored one has ended or is longer."""
        of_seed = results["runs"].setdefault(self.shape, {}).setdefault(f"{self.rate:g}", {})
        known = of_seed.get(str(self.seed))
        if known and (bool(known["ended"]), known["iterations"][-1]) > (bool(run["ended"]), run["iterations"][-1]):
            return
        of_seed[str(self.seed)] = run

    def iterations(self, arguments: argparse.Namespace) -> int:
        shape = SHAPES[self.shape]
        limit = arguments.limit * (2 if shape.is_reference else 1)
        if shape.horizon is not None:  # not capped, because the learning rate falls until then
            return shape.iterations_in(shape.horizon)
        return min(MOST_ITERATIONS, shape.iterations_in(limit))

    def folder(self, arguments: argparse.Namespace) -> Path:
        root: Path = arguments.root.absolute()
        return root / f"{self.shape}_{self.rate:g}_{self.seed}"

    def job(self, arguments: argparse.Namespace) -> Job:
        shape, folder = SHAPES[self.shape], self.folder(arguments)
        every = 2 if arguments.tiny else max(1, round(EVALUATE_SECONDS / shape.charged(HEADLINE)))
        held_out = "prompts: 8, samples: 1" if arguments.tiny else "prompts: 96, samples: 4, micro_batch: 384"
        settings = (
            *shape.settings,
            *shape.larger_batches,
            *shape.schedule,
            f"learner.optimizer.lr={self.rate:g}",
            f"evaluation={{every: {every}, {held_out}, steps: 10, pictures: 0, reference: ''}}",
            f"run={{name: {folder.name}, root: '{folder.parent}', seed: {self.seed}}}",
            f"run.iterations={self.iterations(arguments)}",
            *(ON_ONE_GPU if arguments.gpu else EMULATED if shape.pool else ()),
        )
        return Job((CONFIGS / "demo.yaml", CONFIGS / "methods" / "diffusion_nft.yaml"), settings)


def wanted(stage: str, runs: Runs, names: Sequence[str], given: Sequence[str] = ()) -> list[Key]:
    """The runs of a search stage, chosen by the results so far.

    Args:
        given: settings to use instead of those that the stage would choose.
    """
    chosen = list(given) or _chosen(stage, runs, names)
    if stage == "screen":
        return [Key(name, RATES[0], SEEDS[0]) for name in chosen]
    if stage == "rates":
        return [Key(name, rate, SEEDS[0]) for name in chosen for rate in RATES[1:]]
    rates = {name: float(best_rate(runs, name)[1]) for name in chosen}
    return [Key(name, rates[name], seed) for seed in SEEDS for name in chosen]


def _chosen(stage: str, runs: Runs, names: Sequence[str]) -> list[str]:
    """The settings of a search stage."""
    if stage == "screen":
        return list(names)
    if stage == "rates":
        orders = [ranked(runs, two_stage, SHARES[0], options=False) for two_stage in (False, True)]
        near = (name for order in orders for took, name, _ in order if took.mean <= NEAR * order[0][0].mean)
        return list(dict.fromkeys([REFERENCE, *near]))
    front = (name for two_stage in (True, False) for _, name, _ in ranked(runs, two_stage)[:FRONT])
    return list(dict.fromkeys([*front, REFERENCE]))


def train_stages(
    stages: Sequence[str], names: Sequence[str], results: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """Train the search stages in turn. Stops when the time is over, or after a stage with unfinished runs, because the
    next stage depends on them.
    """
    deadline = time.monotonic() + arguments.seconds
    for stage in stages:
        missing = [key for key in wanted(stage, results["runs"], names, arguments.shapes) if not key.has_ended(results)]
        left = deadline - time.monotonic()
        print(f"{stage}: {len(missing)} runs to train", flush=True)
        if missing and left > 0:
            train(missing, results, arguments, left, Pace.of(results["runs"]) if stage in STAGES[:2] else None)
            save(results, arguments.results)  # before summary(), which takes a while
        if not all(key.has_ended(results) for key in missing):
            return


def run_of(
    key: Key, folder: Path, last: int, pace: Pace | None = None, scaled: Callable[[float], float] = float
) -> dict[str, Any] | None:
    """A run's curve so far, with `ended`: the reason why it ended, or empty. None before its second evaluation.

    Args:
        last: the last iteration that counts.
        scaled: maps a held-out reward to the testbed's scale.
    """
    if not RunFolder(folder).begun:
        return None
    data = read_run(folder)
    points = [point for point in Curve.of(data).points if point.updates <= last]
    if len(points) < 2:
        return None
    run: dict[str, Any] = {
        "iterations": [point.updates for point in points],
        "reward": [scaled(point.reward) for point in points],
        "conditions": data.attestations[0].device if data.attestations else "",
    }
    if run["reward"][-1] >= target(SHARES[-1]):
        return run | {"ended": "reached"}
    if run["iterations"][-1] >= last:
        return run | {"ended": "limit"}
    return run | {"ended": "behind" if pace and pace.look(key.shape, run) else ""}


def train(
    keys: Sequence[Key], results: dict[str, Any], arguments: argparse.Namespace, seconds: float, pace: Pace | None
) -> None:
    """Train runs for at most `seconds` and store them in the results; those with most iterations start first."""
    last = {key: key.iterations(arguments) for key in sorted(keys, key=lambda key: -key.iterations(arguments))}
    jobs = {key.job(arguments): key for key in last}

    def found(job: Job) -> dict[str, Any] | None:
        return run_of(jobs[job], jobs[job].folder(arguments), last[jobs[job]], pace)

    saved = time.monotonic()

    def enough(job: Job) -> bool:
        nonlocal saved
        if run := found(job):
            jobs[job].keep(results, run)
        if time.monotonic() > saved + SAVE_SECONDS:
            save(results, arguments.results)
            saved = time.monotonic()
        return run is not None and run["ended"] in ("reached", "behind")

    with mps(arguments.gpus, arguments.mps) as places:
        train_all(list(jobs), at_once=arguments.at_once, seconds=seconds, places=places, enough=enough)
    for job, key in jobs.items():
        if run := found(job):
            key.keep(results, run)


def devices(count: int) -> list[str]:
    """The first `count` GPUs of `CUDA_VISIBLE_DEVICES`, or 0 … `count` - 1 if it is not set.

    Exits with an error message if the variable names fewer.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [str(gpu) for gpu in range(count)] if given is None else [part for part in given.split(",") if part.strip()]
    if len(named) < count:
        sys.exit(f"CUDA_VISIBLE_DEVICES is {given!r}, but --gpus is {count}; it must be at most {len(named)}")
    return [part.strip() for part in named[:count]]


@contextmanager
def mps(gpus: int, wanted: bool) -> Iterator[list[dict[str, str]]]:
    """Start an MPS server per GPU, if `wanted`; yields the environment variables with which a process uses each GPU.

    Pipes are in separate folders: other processes of the machine neither join these servers nor end with them.
    """
    if not wanted:
        yield [{"CUDA_VISIBLE_DEVICES": device} for device in devices(gpus)] if gpus > 1 else [{}]
        return
    alone = [{"CUDA_VISIBLE_DEVICES": device} for device in devices(gpus)]
    with ExitStack() as stack:
        # With MPS, CUDA_VISIBLE_DEVICES of a client counts the GPUs of its server; each server here has one GPU, 0.
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in alone]
        servers = [{"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder} for folder in folders]
        command = ["nvidia-cuda-mps-control"]
        for server, of_gpu in zip(servers, alone, strict=True):
            subprocess.run([*command, "-d"], check=True, env=os.environ | server | of_gpu)
            stack.callback(subprocess.run, command, input=b"quit\n", check=False, env=os.environ | server)
        yield [server | {"CUDA_VISIBLE_DEVICES": "0"} for server in servers]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options shared with `world_shapes.py`."""
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs in parallel")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop all runs after this time")
    parser.add_argument("--limit", type=float, help="maximum simulated GPU seconds of a run, as FLUX.1-dev")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs to spread the runs over")
    parser.add_argument("--mps", action="store_true", help="start NVIDIA's MPS")
    parser.add_argument("--tiny", action="store_true", help="one setting per side, a few iterations, for a CPU")
    parser.add_argument("--show", action="store_true", help="print the results file without training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=STAGES, help="run only this search stage; default: all in turn")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        metavar="NAME",
        default=(),
        help="settings, instead of the stage's choice",
    )
    parser.add_argument("--runs", nargs="+", metavar="NAME@LR", help="train these settings at these learning rates")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="SEED", help="seeds for --runs")
    options(parser)
    parser.add_argument("--root", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.limit = TINY_LIMIT if arguments.tiny else arguments.limit or CHARGED_LIMIT
    names = TINY if arguments.tiny else MAP
    results = opened(arguments.results)
    if arguments.runs:
        named = [run.rpartition("@") for run in arguments.runs]
        if unknown := [name for name, _, _ in named if name not in SHAPES]:
            parser.error(f"--runs: {unknown[0]!r} is no setting; an example is 1x3_2of16+kl_0_2of7@5e-4")
        keys = [Key(name, float(rate), seed) for seed in arguments.seeds for name, _, rate in named]
        train([key for key in keys if not key.has_ended(results)], results, arguments, arguments.seconds, None)
    elif not arguments.show:
        train_stages((arguments.stage,) if arguments.stage else STAGES, names, results, arguments)
    results |= summary(results)
    save(results, arguments.results)
    show(results)


def opened(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    return found


def save(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(INNERMOST.sub(lambda found: " ".join(found[0].split()), json.dumps(results, indent=1)) + "\n")


if __name__ == "__main__":
    main()
