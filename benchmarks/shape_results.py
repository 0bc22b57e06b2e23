"""The rollout settings that `shapes.py` compares: their simulated GPU time, and the evaluation of their results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from common import CONFIGS

from solrl_ray.config.loading import Sources, load
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.models.shapes import shipped
from solrl_ray.planning.arithmetic import ModelFacts, describe
from solrl_ray.planning.forecast import forecast
from solrl_ray.planning.outline import facts_of
from solrl_ray.planning.prices import Cluster, orchestration, price_list

NFT = "objective={timestep_fraction: 0.4, old_decay: {kind: copy}}"
"""The demo's objective. With the published decay `old` would lag behind in a run of few updates."""
FLUX = ModelFacts(
    latent_shape=(16, 64, 64),
    parameters=11_901_408_320,
    lora_modules=304,
    lora_parameters=74_711_040,
    packed_bytes=0,
    quantized_parameters=8_604_718_215,  # 72.3 % (rollout_flux.json)
    touched_parameters=1_793_064_960,
)
"""Facts of the published checkpoint whose times are simulated."""
RESAMPLES = 2000
ENDS = (0.025, 0.975)
"""Quantiles of a 95 % interval."""
BASE, REAL = 0.45, 0.95
"""Held-out rewards of the untrained model and of real images; they define 0 % and 100 % of the gap."""
SHARES = (0.75, 0.9, 0.95)
RATES = (1e-3, 5e-4, 2e-3, 4e-3)
SEEDS = (42, 43, 44, 45, 46)
NEAR, FRONT = 2.0, 3
LARGEST_MICRO_BATCH, PRUNE_AFTER = 24, 2
NO_KL = ("objective={shared_noise: true, kl: 0}",)
TWO_EARLY = ("objective={shared_noise: true, kl: 0, step_range: [0, 5], timestep_fraction: 0.4}",)
OPTIONS: dict[str, tuple[str, ...]] = {
    "shared_noise": ("objective.shared_noise=true",),
    "kl_0": ("objective.kl=0",),
    "epochs_2": ("learner.epochs=2", "objective.clip_range=0.1"),
    "epochs_2_near": ("learner.epochs=2", "objective.clip_range=0.03"),
    "early_half": ("objective={step_range: [0, 5], timestep_fraction: 0.8}",),
    "late_half": ("objective={step_range: [5, 10], timestep_fraction: 0.8}",),
    "shared_noise_kl_0": NO_KL,
    "two_early": ("objective={step_range: [0, 5], timestep_fraction: 0.4}",),
    "kl_0_decay_300": (*NO_KL, "learner.schedule={decay: inverse_sqrt, steps: 300}"),
    "kl_0_decay_150": (*NO_KL, "learner.schedule={decay: inverse_sqrt, steps: 150}"),
    "kl_0_decay_50": (*NO_KL, "learner.schedule={decay: inverse_sqrt, steps: 50}"),
    "kl_0_ema_98": (*NO_KL, "learner.ema_cap=0.98"),
    "kl_0_decay_150_ema_98": (*NO_KL, "learner={ema_cap: 0.98, schedule: {decay: inverse_sqrt, steps: 150}}"),
    "kl_0_beta2_99": (*NO_KL, "learner.optimizer.betas=[0.9, 0.99]"),
    "kl_0_beta1_95": (*NO_KL, "learner.optimizer.betas=[0.95, 0.999]"),
    "kl_0_group_std": (*NO_KL, "objective.advantage={std: group}"),
    "kl_0_2of5": TWO_EARLY,
    "kl_0_2of5_decay_50": (*TWO_EARLY, "learner.schedule={decay: inverse_sqrt, steps: 50}"),
    "kl_0_2of5_ema_98": (*TWO_EARLY, "learner.ema_cap=0.98"),
    "kl_0_2of5_decay_50_ema_98": (*TWO_EARLY, "learner={ema_cap: 0.98, schedule: {decay: inverse_sqrt, steps: 50}}"),
    "kl_0_1of5": ("objective={shared_noise: true, kl: 0, step_range: [0, 5], timestep_fraction: 0.2}",),
    "kl_0_2of4": ("objective={shared_noise: true, kl: 0, step_range: [0, 4], timestep_fraction: 0.5}",),
    "kl_0_2of7": ("objective={shared_noise: true, kl: 0, step_range: [0, 7], timestep_fraction: 0.3}",),
    "kl_0_4of5": ("objective={shared_noise: true, kl: 0, step_range: [0, 5], timestep_fraction: 0.8}",),
    "ema_95": ("learner.ema_cap=0.95",),
    "ema_98": ("learner.ema_cap=0.98",),
    "all": ("learner.epochs=2", "objective={clip_range: 0.1, shared_noise: true, kl: 0}"),
    "decay_2000": (),
    "decay_4000": (),
}
"""Options that may reduce a gradient's noise at the same cost, or its cost at the same noise. 4 of 10 steps are
trained; halves have as many, `two_early` has two. With `decay_2000` and `decay_4000` the learning rate falls linearly
to 0 at the end. All `kl_0_…` share the noise and have no KL term: `decay_N` is the inverse square root, `NofM` trains
N of the M noisiest steps, `beta1_95` and `beta2_99` are Adam's, `group_std` divides by the deviation of the pair.
"""
HORIZONS = {"decay_2000": 2000.0, "decay_4000": 4000.0}
"""Option → simulated seconds of FLUX.1-dev after which a run with this decay ends. The length is chosen before the run:
its time to a share of the gap is valid for this length only, and a run that has not closed the share by then never
does.
"""
REFERENCE = "12x1_24of24"
CHARGED_LIMIT = 6000.0
"""Maximum simulated seconds of a run, as FLUX.1-dev: more than twice the time of the best settings to 90 %. The slower
reference may take twice as long; a decay of the learning rate has its own limit.
"""
GPU = "h200"
"""The GPU that is simulated."""
HEADLINE = "flux1_dev"
VIDEO = "wan22_5b"
"""The model simulated for videos: 49 frames of 480 x 832 pixels."""
VIDEO_PREVIEWS = {VIDEO: "[0, 1, 3, 5, 7, 9, 11, 12]", "wan22_5b, all frames": "null"}
"""Simulated model → latent frames that previews decode: the same share, rounded up, as 5 of the moving world's 9; or
all.
"""


def _facts(config: Config) -> ModelFacts:
    shapes = shipped(config.model)
    assert shapes is not None
    return facts_of(config, Sources(), shapes, pool_sampling(config).tier)


def _micro_batch(samples: int) -> int:
    """The largest micro-batch that divides `samples`."""
    return max(n for n in range(1, LARGEST_MICRO_BATCH + 1) if samples % n == 0)


@dataclass(frozen=True, slots=True)
class Shape:
    prompts: int
    chosen: int
    pool: int
    """Seeds per prompt; 0: one stage."""
    steps: int
    option: str = ""

    @property
    def name(self) -> str:
        with_option = f"+{self.option}" if self.option else ""
        return f"{self.prompts}x{self.steps}_{self.chosen}of{self.pool or self.chosen}{with_option}"

    @property
    def is_reference(self) -> bool:
        """True for 24 of 24 with 12 prompts, with or without an option."""
        return self.name.partition("+")[0] == REFERENCE

    @property
    def finished(self) -> int:
        """Number of previews that are finished, not pruned."""
        return min(36 if self.pool == 96 or self.chosen == 24 else 24, self.pool // 2 if self.pool < 48 else self.pool)

    @property
    def settings(self) -> tuple[str, ...]:
        samples = self.prompts * self.chosen
        micro_batch = _micro_batch(samples)
        one_stage = f"strategy: direct, pool: {self.chosen}, explore: {{micro_batch: {self.chosen}}}"
        explore = f"{{micro_batch: {min(12, self.finished)}, precision: fp8}}"
        two_stage = f"strategy: two_stage, pool: {self.pool}, explore: {explore}"
        prune = f"rollout.preview={{unit: {self.pool}, prune: {{after: {PRUNE_AFTER}, keep: {self.finished}}}}}"
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
        """Simulated seconds of the run, as FLUX.1-dev, if the option fixes them."""
        return HORIZONS.get(self.option)

    @property
    def schedule(self) -> tuple[str, ...]:
        """The learning rate's schedule, which depends on an iteration's simulated time but does not change it."""
        if self.horizon is None:
            return ()
        return (f"learner.schedule={{decay: linear, steps: {self.steps * self.iterations_in(self.horizon)}}}",)

    @property
    def limit(self) -> float:
        """Maximum simulated seconds of a run, as FLUX.1-dev."""
        return self.horizon or CHARGED_LIMIT * (2 if self.is_reference else 1)

    def iterations_in(self, seconds: float) -> int:
        """Iterations in so many simulated seconds of FLUX.1-dev; at least two."""
        return max(2, math.ceil(seconds / self.charged(HEADLINE)))

    @property
    def larger_batches(self) -> tuple[str, ...]:
        """Batch sizes for the testbed's small model, whose time is spent launching kernels."""
        samples = self.prompts * self.chosen
        learner = max(n for n in range(1, 4 * LARGEST_MICRO_BATCH + 1) if samples % n == 0)
        explore = ("rollout.explore.micro_batch=24",) if self.pool == 48 and self.chosen < 24 else ()
        return (f"learner.micro_batch={learner}", *explore)

    @cache  # noqa: B019 - a few hundred instances
    def charged(self, place: str) -> float:
        """Simulated seconds of an iteration; `place` is `HEADLINE` or one of `VIDEO_PREVIEWS`."""
        model = HEADLINE if place == HEADLINE else VIDEO
        workers = "{count: 1, num_gpus: 1}"
        frames = VIDEO_PREVIEWS.get(place) if self.pool else None
        files = (CONFIGS / "demo.yaml", CONFIGS / f"models/{model}.yaml", CONFIGS / "methods/diffusion_nft.yaml")
        settings = (
            *self.settings,
            f"fleet={{placement: colocated, explorers: {workers}, regenerators: {workers}}}",
            "fleet={learners: {num_gpus: 1}}",
            "compile={enabled: true, learner: true}",
            f"learner={{activation_memory: 0.5, micro_batch: {_micro_batch(self.prompts * self.chosen)}}}",
            *([f"rollout.preview.latent_frames={frames}"] if frames else []),
        )
        config = load(files, settings)
        arithmetic = describe(config, FLUX if model == HEADLINE else _facts(config))
        return forecast(arithmetic, price_list(GPU), Cluster(gpu=GPU), orchestration()).seconds


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(prompts, chosen, pool, steps, option)
        for option in ("", *OPTIONS)
        for prompts in (1, 2, 4, 12)
        for chosen in (2, 4, 8, 24)
        for pool in (0, 8, 12, 16, 24, 48, 96)
        if not pool or pool > chosen
        for steps in (1, 3, 6)
    )
}
MAP = tuple(name for name, shape in SHAPES.items() if not shape.option)
Runs = dict[str, dict[str, dict[str, Any]]]
"""Setting → learning rate → seed → its curve."""


def target(share: float) -> float:
    return BASE + share * (REAL - BASE)


def iterations_to(run: dict[str, Any], share: float) -> float:
    """Iterations to a share of the gap, interpolated between evaluations; infinite if the run never reached it."""
    points = list(zip(run["iterations"], run["reward"], strict=True))
    for (made, before), (later, after) in pairwise(points):
        if after >= target(share):
            return float(made + max(0.0, target(share) - before) / (after - before) * (later - made))
    return math.inf


@dataclass(frozen=True, slots=True)
class Times:
    """Times to a share of the gap for one setting and learning rate, one per seed."""

    seconds: tuple[float, ...]
    """Simulated; a run that never reached the share counts with its total time."""
    there: int
    """Number of runs that reached the share."""

    @property
    def complete(self) -> bool:
        return 0 < len(self.seconds) == self.there

    @property
    def mean(self) -> float:
        """Lower bound of the mean, exact if all runs reached the share; infinite if none did."""
        return float(np.mean(self.seconds)) if self.there else math.inf

    @property
    def order(self) -> tuple[bool, int, float]:
        """Sort key. Settings with most seeds come first, because the fastest of many with one seed is just lucky."""
        return not self.there, -len(self.seconds), self.mean


def times(runs: Runs, shape: str, rate: str, share: float = 0.9) -> Times:
    """Time of each seed to a share of the gap.

    An interrupted run counts only if it has reached the share. As long as such runs are missing, only the first seed
    counts, if its time is known: a mean over the other known ones would favour fast seeds.

    Times are capped at the setting's limit, even for longer runs, so that all learning rates get equal time.
    """
    of_seed = runs.get(shape, {}).get(rate, {})
    charged = SHAPES[shape].charged(HEADLINE)
    limit = SHAPES[shape].limit / charged + 1
    took = {seed: iterations_to(run, share) for seed, run in sorted(of_seed.items())}
    known = {seed: found for seed, found in took.items() if math.isfinite(found) or of_seed[seed]["ended"]}
    if len(known) < len(took):
        known = {seed: found for seed, found in known.items() if seed == str(SEEDS[0])}
    had = [min(found, of_seed[seed]["iterations"][-1], limit) for seed, found in known.items()]
    return Times(tuple(count * charged for count in had), sum(found <= limit for found in known.values()))


def best_rate(runs: Runs, shape: str, share: float = 0.9) -> tuple[Times, str]:
    """The fastest learning rate of a setting, by `Times.order`; by the smallest share if none reached `share`."""
    tried = [
        (times(runs, shape, rate, share), times(runs, shape, rate, SHARES[0]).order, rate)
        for rate in runs.get(shape, {})
    ]
    if not tried:
        return Times((), 0), f"{RATES[0]:g}"
    took, _, rate = min(tried, key=lambda found: (found[0].order, *found[1:]))
    return took, rate


def ranked(runs: Runs, two_stage: bool, share: float = 0.9, options: bool = True) -> list[tuple[Times, str, str]]:
    """The settings of one side that reached the share, with their best learning rate, fastest first."""
    side = [name for name in runs if (options or name in MAP) and bool(SHAPES[name].pool) == two_stage]
    found = [(took, name, rate) for name in side for took, rate in [best_rate(runs, name, share)]]
    return sorted((one for one in found if one[0].there), key=lambda one: one[0].order)


def winner(runs: Runs, two_stage: bool) -> str | None:
    return next((name for _, name, _ in ranked(runs, two_stage)), None)


def reference_of(runs: Runs) -> str:
    """24 of 24, without an option if possible."""
    return next((name for name in (REFERENCE, *runs) if name in runs and SHAPES[name].is_reference), REFERENCE)


def ratio(mine: Times, other: Times) -> list[float | None] | None:
    """Speed-up, mean over mean, with a bootstrap interval over seeds. None if not all of mine reached the target; a
    lower bound if not all others did.
    """
    if not mine.complete or not other.seconds:
        return None
    random = np.random.default_rng(0)
    middle = float(np.mean(other.seconds) / np.mean(mine.seconds))
    if min(len(mine.seconds), len(other.seconds)) < 2:
        return [middle, None, None]
    a, b = (
        np.array(each.seconds)[random.integers(len(each.seconds), size=(RESAMPLES, len(each.seconds)))].mean(axis=1)
        for each in (mine, other)
    )
    return [middle, *np.quantile(b / a, ENDS).tolist()]


def fall(run: dict[str, Any]) -> float:
    """Distance of the last reward below the best."""
    return float(max(run["reward"]) - run["reward"][-1])


def summary(results: dict[str, Any]) -> dict[str, Any]:
    runs: Runs = results["runs"]
    rates = {name: best_rate(runs, name)[1] for name in runs}

    def mean(name: str, share: float) -> float | None:
        took = times(runs, name, rates[name], share)
        return took.mean if took.complete else None

    two, one = winner(runs, True), winner(runs, False)
    best = {name: best_rate(runs, name)[0] for name in (two, one, reference_of(runs)) if name}
    fastest, reference = best.get(two or "", Times((), 0)), best[reference_of(runs)]
    return {
        "charged": {name: {HEADLINE: SHAPES[name].charged(HEADLINE)} for name in rates},
        "seconds_to": {HEADLINE: {name: {f"{share:g}": mean(name, share) for share in SHARES} for name in rates}},
        "rates": rates,
        "best": {"two_stage": two, "one_stage": one},
        "seconds_to_90": fastest.mean if fastest.complete else None,
        "two_stage_over_one_stage": ratio(fastest, best.get(one or "", Times((), 0))),
        "over_24_of_24": ratio(fastest, reference),
    }


def show(results: dict[str, Any]) -> None:
    print("| setting | learning rate | seeds at 90 % | s to 75 % / 90 % / 95 % |")
    print("|---|---|---|---|")
    found = results["seconds_to"][HEADLINE]
    for name, seconds in sorted(found.items(), key=lambda item: item[1]["0.9"] or math.inf):
        cell = " / ".join("–" if took is None else f"{took:,.0f}" for took in seconds.values())
        rate = results["rates"][name]
        took = times(results["runs"], name, rate)
        print(f"| {name} | {rate} | {took.there} of {len(took.seconds)} | {cell} |")
    for key in ("best", "seconds_to_90", "two_stage_over_one_stage", "over_24_of_24"):
        print(f"{key}: {results[key]}")


@dataclass(frozen=True, slots=True)
class Pace:
    """Decides which runs are stopped because they are too slow to close 75 % of the gap."""

    fastest: dict[bool, float]
    """True for two stages, False for one → simulated seconds of the fastest run so far to 75 %."""

    @classmethod
    def of(cls, runs: Runs) -> Pace:
        pace = cls({True: math.inf, False: math.inf})
        for shape, of_rate in runs.items():
            for run in (run for of_seed in of_rate.values() for run in of_seed.values()):
                pace.look(shape, run)
        return pace

    def look(self, shape: str, run: dict[str, Any]) -> bool:
        """Take a run into account; returns True if it is slower than `NEAR` times the fastest."""
        side, charged = bool(SHAPES[shape].pool), SHAPES[shape].charged(HEADLINE)
        took = iterations_to(run, SHARES[0]) * charged
        self.fastest[side] = min(self.fastest[side], took)
        return math.isinf(took) and run["iterations"][-1] * charged > NEAR * self.fastest[side]
