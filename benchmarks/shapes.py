"""Which shape of an iteration comes soonest to a good model? Prompts an optimiser step, samples, pool, steps.

    python benchmarks/shapes.py --gpu --at-once 16 --seconds 480 [--stage screen] [--mps]
    python benchmarks/shapes.py --show
    python benchmarks/shapes.py --tiny --seconds 300 --root /tmp/shapes --results /tmp/shapes.json   # on a CPU: a try

Runs of the testbed, each one process (`one_process.py`), by DiffusionNFT with `old_decay: copy`. A shape is a choice of

    prompts    of an optimiser step: 1, 2, 4, 12
    chosen     K samples of each prompt that are trained on: 4, 8, 24
    pool       none (one stage: all K are trained on), or 48 or 96 seeds with pruned FP8 previews (two stages)
    steps      optimiser steps an iteration: 1, 3, 6; an iteration has prompts × steps prompts

A run ends when its held-out reward is at 95 % of the way from the base to real pictures, when its charged time is over,
or, in the first two stages below, when it is not at 75 % after `NEAR` times what the soonest run of its side took to be
there. The search is the same for one stage and for two, in stages that follow from the results file:

    screen     every shape, one seed, the first learning rate
    rates      the shapes that came to 75 % within `NEAR` times the best of their side: the other learning rates
    seeds      the best `FRONT` of each side at their best rate, and the reference 24 of 24 with 12 prompts: five seeds
    long       the best of each side, five seeds, `LONG` iterations without an end before: how far do they fall?

A lent GPU is there for minutes: after `--seconds` what still trains is stopped and kept as a run that was cut short.
The same command goes on, with its folder if that is still there, else from its beginning; what the results file has as
ended is not trained again. `--mps` starts NVIDIA's MPS, with which processes compute at once on one GPU.

*Charged* seconds are `solrl plan`'s of an iteration of that shape, its fixed cost included: FLUX.1-dev and SD3.5-Large
on an H200, and with NVFP4 previews on a B200 (whose prices are estimates).

Prints all shapes, soonest first; writes benchmarks/results/shapes.json: `runs` and `long` by shape, rate and seed,
`charged`, `seconds_to` by price, shape and share, `rates` (each shape's best), `best`, `seconds_to_90`,
`two_stage_over_one_stage` and `over_24_of_24` (ratio, low, high of a bootstrap over seeds, FLUX.1-dev on an H200), and
`worst_fall`: the most that a long run ended below its best.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from campaign import ON_ONE_GPU, REPOSITORY, Job, train_all
from convergence import CONFIGS, MODELS, curve, priced
from time_to_target import ENDS, RESAMPLES
from variants import NFT

RESULTS = REPOSITORY / "benchmarks" / "results" / "shapes.json"
BASE, REAL = 0.45, 0.95
"""Held-out rewards of the untrained model and of the world's own pictures: no way and all of the way."""
SHARES = (0.75, 0.9, 0.95)
RATES = (1e-3, 5e-4, 2e-3)
SEEDS = (42, 43, 44, 45, 46)
NEAR, FRONT, LONG = 2.0, 3, 200
CHARGED_LIMIT = 6000.0
"""Charged seconds that a run may take, as FLUX.1-dev: about twice what the best shapes need for 90 %. The reference,
which needs longer, may take twice as many.
"""
MOST_ITERATIONS = 600
"""Of a run: the smallest iterations are charged for so little that they would not end here."""
EVALUATE_SECONDS = 100.0
"""Charged, between evaluations."""
LARGEST_MICRO_BATCH = 24
EMULATED = ("rollout.explore.precision=nvfp4-emulated",)
"""On a CPU, which has no FP8."""
PLACES = {"flux1_dev": ("flux1_dev", "h200"), "sd35_large": ("sd35_large", "h200")}
PLACES |= {f"{model}_b200": (model, "b200") for model in MODELS}
"""Name of a column → model and card whose prices are charged."""
HEADLINE = "flux1_dev"


@dataclass(frozen=True, slots=True)
class Shape:
    prompts: int
    chosen: int
    pool: int
    """0: one stage."""
    steps: int

    @property
    def name(self) -> str:
        return f"{self.prompts}x{self.steps}_{self.chosen}of{self.pool or self.chosen}"

    @property
    def settings(self) -> tuple[str, ...]:
        samples = self.prompts * self.chosen
        micro_batch = max(n for n in range(1, LARGEST_MICRO_BATCH + 1) if samples % n == 0)
        one_stage = f"strategy: direct, pool: {self.chosen}, explore: {{micro_batch: {self.chosen}}}"
        two_stage = f"strategy: two_stage, pool: {self.pool}, explore: {{micro_batch: 12, precision: fp8}}"
        finished = 36 if self.pool == 96 or self.chosen == 24 else 24
        prune = f"rollout.preview={{unit: {self.pool}, prune: {{after: 2, keep: {finished}}}}}"
        return (
            NFT,
            f"rollout={{prompts: {self.prompts * self.steps}, keep: {self.chosen}}}",
            f"rollout.regenerate.micro_batch={self.chosen}",
            f"learner={{updates: {self.steps}, micro_batch: {micro_batch}}}",
            *((f"rollout={{{two_stage}}}", prune) if self.pool else (f"rollout={{{one_stage}}}",)),
        )

    @cache  # noqa: B019 - a few hundred of them
    def charged(self, place: str) -> float:
        """Seconds of an iteration."""
        model, gpu = PLACES[place]
        files = (CONFIGS / "demo.yaml", CONFIGS / f"models/{model}.yaml", CONFIGS / "methods/diffusion_nft.yaml")
        settings = (
            *self.settings,
            "fleet={placement: colocated, explorers: {count: 1, num_gpus: 1}, regenerators: {count: 1, num_gpus: 1}}",
            "fleet={learners: {num_gpus: 1}}",
            "compile={enabled: true, learner: true}",
            "learner.activation_memory=0.5",
            *(["rollout.explore.precision=nvfp4"] if self.pool and gpu == "b200" else []),
        )
        return priced(files, settings, MODELS[model], gpu).seconds


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(prompts, chosen, pool, steps)
        for prompts in (1, 2, 4, 12)
        for chosen in (4, 8, 24)
        for pool in (0, 48, 96)
        for steps in (1, 3, 6)
    )
}
REFERENCE = Shape(12, 24, 0, 1).name
TINY_LIMIT = 30.0
TINY = (Shape(1, 4, 0, 1).name, Shape(2, 4, 48, 1).name)
STAGES = ("screen", "rates", "seeds", "long")
LIST = re.compile(r"\[[^][{}]*\]")
"""Of numbers, which the results file has on one line."""
Runs = dict[str, dict[str, dict[str, Any]]]
"""Shape → learning rate → seed → its curve."""


@dataclass(frozen=True, slots=True)
class Key:
    """Of a run."""

    shape: str
    rate: float
    seed: int
    long: bool = False

    def has_ended(self, results: dict[str, Any]) -> bool:
        found = self._side(results).get(self.shape, {}).get(f"{self.rate:g}", {}).get(str(self.seed), {})
        return bool(found.get("ended"))

    def keep(self, results: dict[str, Any], run: dict[str, Any]) -> None:
        of_shape = self._side(results).setdefault(self.shape, {})
        of_shape.setdefault(f"{self.rate:g}", {})[str(self.seed)] = run

    def _side(self, results: dict[str, Any]) -> dict[str, Any]:
        side: dict[str, Any] = results["long" if self.long else "runs"]
        return side

    def iterations(self, arguments: argparse.Namespace) -> int:
        if self.long:
            return 4 if arguments.tiny else LONG
        limit = arguments.limit * (2 if self.shape == REFERENCE else 1)
        return min(MOST_ITERATIONS, max(2, math.ceil(limit / SHAPES[self.shape].charged(HEADLINE))))

    def folder(self, arguments: argparse.Namespace) -> Path:
        root: Path = arguments.root.absolute()
        return root / f"{self.shape}_{self.rate:g}_{self.seed}{'_long' * self.long}"

    def job(self, arguments: argparse.Namespace) -> Job:
        shape, folder = SHAPES[self.shape], self.folder(arguments)
        every = 2 if arguments.tiny else max(1, round(EVALUATE_SECONDS / shape.charged(HEADLINE)))
        held_out = "prompts: 8, samples: 1" if arguments.tiny else "prompts: 96, samples: 4"
        settings = (
            *shape.settings,
            f"learner.optimizer.lr={self.rate:g}",
            f"evaluation={{every: {every}, {held_out}, steps: 10, pictures: 0, reference: ''}}",
            f"run={{name: {folder.name}, root: '{folder.parent}', seed: {self.seed}}}",
            f"run.iterations={self.iterations(arguments)}",
            *(ON_ONE_GPU if arguments.gpu else EMULATED if shape.pool else ()),
        )
        return Job((CONFIGS / "demo.yaml", CONFIGS / "methods" / "diffusion_nft.yaml"), settings)


# What the results say


def target(share: float) -> float:
    return BASE + share * (REAL - BASE)


def iterations_to(run: dict[str, Any], share: float) -> float:
    """On straight lines between evaluations; infinite if it was not there."""
    points = list(zip(run["iterations"], run["reward"], strict=True))
    for (made, before), (later, after) in pairwise(points):
        if after >= target(share):
            return float(made + max(0.0, target(share) - before) / (after - before) * (later - made))
    return math.inf


def seconds(runs: Runs, shape: str, rate: str, place: str = HEADLINE, share: float = 0.9) -> list[float]:
    """Charged, of each seed that has ended."""
    found = [run for run in runs.get(shape, {}).get(rate, {}).values() if run["ended"]]
    return [iterations_to(run, share) * SHAPES[shape].charged(place) for run in found]


def best_rate(runs: Runs, shape: str, share: float = 0.9) -> tuple[float, str]:
    """Seconds of the first seed, which all rates have, and the rate with which it was soonest there."""
    first = {
        rate: iterations_to(of_seed[str(SEEDS[0])], share) * SHAPES[shape].charged(HEADLINE)
        for rate, of_seed in runs.get(shape, {}).items()
        if of_seed.get(str(SEEDS[0]), {}).get("ended")
    }
    return min(((took, rate) for rate, took in first.items()), default=(math.inf, f"{RATES[0]:g}"))


def ranked(runs: Runs, two_stage: bool, share: float = 0.9) -> list[tuple[float, str]]:
    """The shapes of one side that came so far, soonest first."""
    found = ((best_rate(runs, name, share)[0], name) for name in runs if bool(SHAPES[name].pool) == two_stage)
    return sorted(one for one in found if math.isfinite(one[0]))


def winner(runs: Runs, two_stage: bool) -> str | None:
    """Of a side's front, by the mean over seeds."""
    names = [name for _, name in ranked(runs, two_stage)[:FRONT]]
    return min(names, key=lambda name: np.mean(seconds(runs, name, best_rate(runs, name)[1])), default=None)


def wanted(stage: str, runs: Runs, names: Sequence[str]) -> list[Key]:
    """The runs of a stage, by what is known."""
    if stage == "screen":
        return [Key(name, RATES[0], SEEDS[0]) for name in names]
    if stage == "rates":
        near = {REFERENCE: None}
        for order in (ranked(runs, two_stage, SHARES[0]) for two_stage in (False, True)):
            near |= dict.fromkeys(name for took, name in order if took <= NEAR * order[0][0])
        return [Key(name, rate, SEEDS[0]) for name in near for rate in RATES[1:]]
    if stage == "long":
        chosen = [name for two_stage in (True, False) if (name := winner(runs, two_stage))]
    else:
        chosen = [name for two_stage in (True, False) for _, name in ranked(runs, two_stage)[:FRONT]]
        chosen = list(dict.fromkeys([*chosen, REFERENCE]))
    rates = {name: float(best_rate(runs, name)[1]) for name in chosen}
    return [Key(name, rates[name], seed, stage == "long") for seed in SEEDS for name in chosen]


def ratio(mine: Sequence[float], other: Sequence[float]) -> list[float | None] | None:
    """How many times sooner, mean over mean, with the interval of a bootstrap over seeds; 0 if one does not arrive."""
    if not mine or not other:
        return None
    random = np.random.default_rng(0)
    drawn = [
        np.array(side)[random.integers(len(side), size=(RESAMPLES, len(side)))].mean(axis=1) for side in (mine, other)
    ]
    means = [np.array([np.mean(side)]) for side in (mine, other)]
    middle, sampled = (
        np.divide(b, a, out=np.zeros_like(a), where=np.isfinite(a) & np.isfinite(b)) for a, b in (means, drawn)
    )
    ends = np.quantile(sampled, ENDS).tolist() if min(len(mine), len(other)) > 1 else [None, None]
    return [float(middle[0]) or None, *ends]


def summary(results: dict[str, Any]) -> dict[str, Any]:
    runs: Runs = results["runs"]
    rates = {name: rate for name in runs for took, rate in [best_rate(runs, name)] if seconds(runs, name, rate)}

    def mean(name: str, place: str, share: float) -> float | None:
        took = float(np.mean(seconds(runs, name, rates[name], place, share)))
        return took if math.isfinite(took) else None

    def best(name: str | None) -> list[float]:
        return seconds(runs, name, rates[name]) if name in rates else []

    two, one = winner(runs, True), winner(runs, False)
    long_runs = [run for of_rate in results["long"].values() for seeds in of_rate.values() for run in seeds.values()]
    return {
        "charged": {name: {place: SHAPES[name].charged(place) for place in PLACES} for name in rates},
        "seconds_to": {
            place: {name: {f"{share:g}": mean(name, place, share) for share in SHARES} for name in rates}
            for place in PLACES
        },
        "rates": rates,
        "best": {"two_stage": two, "one_stage": one},
        "seconds_to_90": mean(two, HEADLINE, 0.9) if two else None,
        "two_stage_over_one_stage": ratio(best(two), best(one)),
        "over_24_of_24": ratio(best(two), best(REFERENCE)),
        "worst_fall": max((max(run["reward"]) - run["reward"][-1] for run in long_runs if run["ended"]), default=None),
    }


def show(results: dict[str, Any]) -> None:
    print(f"| shape | rate | seeds | s to 75 % / 90 % / 95 % as {' | as '.join(PLACES)} |")
    print("|---|---|---|" + "---|" * len(PLACES))
    found = results["seconds_to"]
    for name, _ in sorted(found[HEADLINE].items(), key=lambda item: item[1]["0.9"] or math.inf):
        cells = (
            " / ".join("–" if took is None else f"{took:,.0f}" for took in found[place][name].values())
            for place in PLACES
        )
        rate = results["rates"][name]
        print(f"| {name} | {rate} | {len(seconds(results['runs'], name, rate))} | {' | '.join(cells)} |")
    for key in ("best", "seconds_to_90", "two_stage_over_one_stage", "over_24_of_24", "worst_fall"):
        print(f"{key}: {results[key]}")


# Training


@dataclass(frozen=True, slots=True)
class Pace:
    """Charged seconds after which a run of a side has no chance, if it is not at 75 %."""

    soonest: dict[bool, float]
    """Whether in two stages → charged seconds to 75 % of the soonest run so far."""

    @classmethod
    def of(cls, runs: Runs) -> Pace:
        pace = cls({True: math.inf, False: math.inf})
        for shape, of_rate in runs.items():
            for run in (run for of_seed in of_rate.values() for run in of_seed.values()):
                pace.look(shape, run)
        return pace

    def look(self, shape: str, run: dict[str, Any]) -> bool:
        """Take a run into account; whether it is behind."""
        side, charged = bool(SHAPES[shape].pool), SHAPES[shape].charged(HEADLINE)
        took = iterations_to(run, SHARES[0]) * charged
        self.soonest[side] = min(self.soonest[side], took)
        return math.isinf(took) and run["iterations"][-1] * charged > NEAR * self.soonest[side]


def run_of(key: Key, folder: Path, last: int, pace: Pace | None = None) -> dict[str, Any] | None:
    """A run's curve so far, and why it has ended, if it has; None before its second evaluation."""
    run = curve(folder, last)
    if run is None:
        return None
    kept: dict[str, Any] = {key: run[key] for key in ("iterations", "reward", "conditions")}
    if not key.long and run["reward"][-1] >= target(SHARES[-1]):
        return kept | {"ended": "reached"}
    if run["iterations"][-1] >= last:
        return kept | {"ended": "limit"}
    return kept | {"ended": "behind" if pace and pace.look(key.shape, run) else ""}


def train(keys: Sequence[Key], results: dict[str, Any], arguments: argparse.Namespace, pace: Pace | None) -> None:
    """Train runs and put them into the results; the shortest first, so that a short session ends some."""
    last = {key: key.iterations(arguments) for key in sorted(keys, key=lambda key: key.iterations(arguments))}
    jobs = {key.job(arguments): key for key in last}

    def found(job: Job) -> dict[str, Any] | None:
        return run_of(jobs[job], jobs[job].folder(arguments), last[jobs[job]], pace)

    with mps(arguments.mps):
        train_all(
            list(jobs),
            at_once=arguments.at_once,
            seconds=arguments.seconds,
            enough=lambda job: (run := found(job)) is not None and run["ended"] in ("reached", "behind"),
        )
    for job, key in jobs.items():
        if run := found(job):
            key.keep(results, run)


@contextmanager
def mps(wanted: bool) -> Iterator[None]:
    """NVIDIA's MPS, for the processes that begin meanwhile."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=STAGES, help="default: the first that is not complete")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop what still trains after so long")
    parser.add_argument("--limit", type=float, default=CHARGED_LIMIT, help="charged seconds of a run, as FLUX.1-dev")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--mps", action="store_true", help="start NVIDIA's MPS on this machine's GPU")
    parser.add_argument("--tiny", action="store_true", help="three shapes of a few iterations, for a CPU")
    parser.add_argument("--show", action="store_true", help="print what the results file has, and train nothing")
    parser.add_argument("--root", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    names = TINY if arguments.tiny else tuple(SHAPES)
    arguments.limit = TINY_LIMIT if arguments.tiny else arguments.limit
    results: dict[str, Any] = {"runs": {}, "long": {}}
    if arguments.results.exists():
        results = json.loads(arguments.results.read_text())
    if not arguments.show:
        stages = (arguments.stage,) if arguments.stage else STAGES
        missing = (
            (stage, [key for key in wanted(stage, results["runs"], names) if not key.has_ended(results)])
            for stage in stages
        )
        stage, keys = next((found for found in missing if found[1]), ("all stages", []))
        print(f"{stage}: {len(keys)} runs to train", flush=True)
        train(keys, results, arguments, Pace.of(results["runs"]) if stage in STAGES[:2] else None)
        save(results, arguments.results)  # before prices are worked out, which takes a while
    results |= summary(results)
    save(results, arguments.results)
    show(results)


def save(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LIST.sub(lambda found: " ".join(found[0].split()), json.dumps(results, indent=1)) + "\n")


if __name__ == "__main__":
    main()
