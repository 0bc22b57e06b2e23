"""The shapes of an iteration that `shapes.py` maps: what each is charged, and what its results say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from convergence import CONFIGS, MODELS, priced
from time_to_target import ENDS, RESAMPLES
from variants import NFT

BASE, REAL = 0.45, 0.95
"""Held-out rewards of the untrained model and of the world's own pictures: no way and all of the way."""
SHARES = (0.75, 0.9, 0.95)
RATES = (1e-3, 5e-4, 2e-3)
SEEDS = (42, 43, 44, 45, 46)
NEAR, FRONT, LONG = 2.0, 3, 200
LARGEST_MICRO_BATCH = 24
OPTIONS: dict[str, tuple[str, ...]] = {
    "shared_noise": ("objective.shared_noise=true",),
    "kl_0": ("objective.kl=0",),
    "epochs_2": ("learner.epochs=2", "objective.clip_range=0.1"),
    "epochs_2_near": ("learner.epochs=2", "objective.clip_range=0.03"),
    "early_half": ("objective={step_range: [0, 5], timestep_fraction: 0.8}",),
    "late_half": ("objective={step_range: [5, 10], timestep_fraction: 0.8}",),
    "two_early": ("objective={step_range: [0, 5], timestep_fraction: 0.4}",),
    "all": ("learner.epochs=2", "objective={clip_range: 0.1, shared_noise: true, kl: 0}"),
    "decay_2000": (),
    "decay_4000": (),
}
"""What may take noise from a gradient at the same price, or its price at the same noise. Of 10 steps 4 are trained;
halves have as many, `two_early` has two. With a decay the learning rate falls in a straight line to 0 at the end.
"""
HORIZONS = {"decay_2000": 2000.0, "decay_4000": 4000.0}
"""Charged seconds, as FLUX.1-dev, after which a run with a decay ends. They have to be chosen before: the time to a
share of the way is that of somebody who gives a run so long, and a run that is not there at its end never is.
"""
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
    option: str = ""

    @property
    def name(self) -> str:
        with_option = f"+{self.option}" if self.option else ""
        return f"{self.prompts}x{self.steps}_{self.chosen}of{self.pool or self.chosen}{with_option}"

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
            *OPTIONS.get(self.option, ()),
        )

    @property
    def horizon(self) -> float | None:
        """Charged seconds of the run, as FLUX.1-dev, if the option fixes them."""
        return HORIZONS.get(self.option)

    @property
    def schedule(self) -> tuple[str, ...]:
        """Of the learning rate. It follows from what an iteration is charged, which it does not change."""
        if self.horizon is None:
            return ()
        return (f"learner.schedule={{decay: linear, steps: {self.steps * self.iterations_in(self.horizon)}}}",)

    def iterations_in(self, seconds: float) -> int:
        """Charged seconds, as FLUX.1-dev, in iterations; at least two."""
        return max(2, math.ceil(seconds / self.charged(HEADLINE)))

    @property
    def larger_batches(self) -> tuple[str, ...]:
        """For the testbed's small model, whose time is that of launching kernels."""
        samples = self.prompts * self.chosen
        learner = max(n for n in range(1, 4 * LARGEST_MICRO_BATCH + 1) if samples % n == 0)
        explore = ("rollout.explore.micro_batch=24",) if self.pool == 48 and self.chosen < 24 else ()
        return (f"learner.micro_batch={learner}", *explore)

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
        Shape(prompts, chosen, pool, steps, option)
        for option in ("", *OPTIONS)
        for prompts in (1, 2, 4, 12)
        for chosen in (4, 8, 24)
        for pool in (0, 48, 96)
        for steps in (1, 3, 6)
    )
}
MAP = tuple(name for name, shape in SHAPES.items() if not shape.option)
REFERENCE = Shape(12, 24, 0, 1).name
Runs = dict[str, dict[str, dict[str, Any]]]
"""Shape → learning rate → seed → its curve."""


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
    """The shapes of one side that came so far, soonest first, without options."""
    side = [name for name in runs if name in MAP and bool(SHAPES[name].pool) == two_stage]
    found = ((best_rate(runs, name, share)[0], name) for name in side)
    return sorted(one for one in found if math.isfinite(one[0]))


def winner(runs: Runs, two_stage: bool) -> str | None:
    """Of a side's front, by the mean over seeds."""
    names = [name for _, name in ranked(runs, two_stage)[:FRONT]]
    return min(names, key=lambda name: np.mean(seconds(runs, name, best_rate(runs, name)[1])), default=None)


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
        "options": {name: ratio(best(name), best(name.partition("+")[0])) for name in rates if SHAPES[name].option},
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
    for key in ("best", "seconds_to_90", "two_stage_over_one_stage", "over_24_of_24", "options", "worst_fall"):
        print(f"{key}: {results[key]}")


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
