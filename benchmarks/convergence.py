"""Does two-stage rollout reach a better model sooner? Held-out reward against iterations, seconds and charged seconds.

    python benchmarks/convergence.py [--only direct two_stage_fp8 …] [--seeds 5] [--iterations 40] [--at-once 8]
                                     [--seconds 480] [--gpu] [--judge] [--set KEY=VALUE …] [--root runs/convergence]

Every run is `solrl train` on the testbed: 12 prompts an iteration, 24 samples of each trained on, with a variant's
method, strategy and precision (`VARIANTS`). `--at-once` runs train side by side; after `--seconds` what still trains is
stopped. A run that is there is gone on with, so the same command completes the campaign by (variant, seed).
`--judge` has each finished run evaluated by the testbed's own rules, which no policy was trained on.

*Charged* seconds are what an iteration of that shape takes on one H200 with a published model, by the shipped price
list and `solrl plan`'s simulation. The NVFP4 variant is charged at the price of FP8: a Hopper card has no FP4 unit.

Prints a table; adds to benchmarks/results/convergence.json and draws its picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from campaign import ON_ONE_GPU, REPOSITORY, Job, train_all

from solrl_ray.config.arithmetic import ModelFacts, describe
from solrl_ray.config.loading import load
from solrl_ray.report.curve import Curve, Point
from solrl_ray.report.data import read_run
from solrl_ray.simulator.forecast import forecast
from solrl_ray.simulator.prices import Cluster, orchestration, price_list
from solrl_ray.storage.run_folder import RunFolder

CONFIGS = REPOSITORY / "configs"
RESULTS = REPOSITORY / "benchmarks" / "results" / "convergence.json"
PICTURE = REPOSITORY / "docs" / "images" / "convergence.png"
SAME = (
    "rollout.prompts=12",
    "rollout.regenerate.micro_batch=24",
    "learner={micro_batch: 24, optimizer: {lr: 1e-3}}",
    "evaluation={every: 4, prompts: 96, samples: 4, steps: 10, pictures: 0, reference: ''}",
)
"""Of every run: the demo's number of prompts and learning rate, and all held-out prompts."""
NFT = "objective={timestep_fraction: 0.4, old_decay: {kind: copy}}"
"""As in the demo: with the published decay `old` would lag behind in a run of few updates."""
DIRECT = "rollout={strategy: direct, pool: 24, keep: 24}"
TWO_STAGE = "rollout={strategy: two_stage, pool: 96, keep: 24}"
TARGETS = (0.5, 0.75, 0.9, 1.0)
"""Shares of the final gain of the method's `direct` variant."""
MODELS = {
    "flux1_dev": ModelFacts(
        latent_shape=(16, 64, 64),
        parameters=11_901_408_320,
        lora_modules=304,
        lora_parameters=74_711_040,
        packed_bytes=0,
    ),
    "sd35_large": ModelFacts(
        latent_shape=(16, 128, 128),
        parameters=8_056_627_520,
        lora_modules=300,
        lora_parameters=47_185_920,
        packed_bytes=0,
    ),
}
"""Whose prices are charged; sizes of the published checkpoints."""
CONFIDENCE = 0.95
RESAMPLES = 2000


class Variant(NamedTuple):
    method: str
    settings: tuple[str, ...]
    charged_as: str = ""
    """Another tier by which previews are charged."""


VARIANTS = {
    "direct": Variant("diffusion_nft", (DIRECT, NFT)),
    "scaled": Variant("diffusion_nft", ("rollout={strategy: scaled, pool: 96, keep: 24}", NFT)),
    "quantized": Variant(
        "diffusion_nft",
        (
            "rollout={strategy: quantized, pool: 96, keep: 24, accept_quantized_training: true}",
            "rollout.explore={precision: nvfp4-emulated}",
            NFT,
        ),
        "fp8",
    ),
    "two_stage_nvfp4": Variant(
        "diffusion_nft", (TWO_STAGE, "rollout.explore={micro_batch: 24, precision: nvfp4-emulated}", NFT), "fp8"
    ),
    "two_stage_fp8": Variant(
        "diffusion_nft", (TWO_STAGE, "rollout.explore={micro_batch: 24, precision: fp8}", NFT), "fp8"
    ),
    **{
        f"{method}_{name}": Variant(method, (rollout, *own), "fp8")
        for method, own in {
            "awm": (),
            "flow_grpo": (),
            "dance_grpo": ("learner.updates=3",),
        }.items()
        for name, rollout in {
            "direct": DIRECT,
            "two_stage": f"{TWO_STAGE[:-1]}, explore: {{micro_batch: 24, precision: nvfp4-emulated}}}}",
        }.items()
    },
}
"""Name → what differs. The authors of AWM, Flow-GRPO and DanceGRPO have `direct`."""


def job(name: str, seed: int, arguments: argparse.Namespace) -> Job:
    variant, root = VARIANTS[name], arguments.root.absolute()
    return Job(
        (CONFIGS / "demo.yaml", CONFIGS / "methods" / f"{variant.method}.yaml"),
        (
            *SAME,
            *variant.settings,
            f"run={{name: {name}-{seed}, root: '{root}', seed: {seed}, iterations: {arguments.iterations}}}",
            *(ON_ONE_GPU if arguments.gpu else ()),
            *arguments.set,
        ),
    )


def charged(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of an iteration of a variant's shape on one H200, by model."""
    variant, found = VARIANTS[name], {}
    for model, facts in MODELS.items():
        # The method last: a model file has settings for DiffusionNFT.
        files = (CONFIGS / "demo.yaml", CONFIGS / f"models/{model}.yaml", CONFIGS / f"methods/{variant.method}.yaml")
        shape = (
            *SAME,
            *variant.settings,
            *arguments.set,
            "fleet={explorers: {count: 1, num_gpus: 0.3}, regenerators: {count: 1, num_gpus: 0.3}}",
            "fleet={learners: {num_gpus: 0.3}}",
            "compile={enabled: true, learner: true}",
            "learner.activation_memory=0.5",
            *([f"rollout.explore.precision={variant.charged_as}"] if variant.charged_as else []),
        )
        config, prices = load(files, shape), price_list("h200")
        found[model] = forecast(config, describe(config, facts), prices, Cluster(gpu="h200"), orchestration()).seconds
    return found


def curve(folder: Path) -> dict[str, Any] | None:
    """Held-out reward of a run by updates made; None before the second evaluation."""
    if not RunFolder(folder).begun:
        return None
    run = read_run(folder)
    points = Curve.of(run).points
    if len(points) < 2:
        return None
    words = folder / "words" / "evaluation.json"
    judged = json.loads(words.read_text())["cells"] if words.is_file() else []
    return {
        "iterations": [point.updates for point in points],
        "seconds": [point.seconds for point in points],
        "reward": [point.reward for point in points],
        "stderr": [point.stderr for point in points],
        "words": {cell["policy"]: cell["mean"] for cell in judged} or None,
        "conditions": run.attestations[0].device if run.attestations else "",
    }


def judge(jobs: Sequence[Job]) -> None:
    """Evaluate each finished run by the words that hold, if that was not done."""
    for each in jobs:
        folder = RunFolder.of(each.config).path
        if each.done and not (folder / "words" / "evaluation.json").is_file():
            rewards = CONFIGS / "rewards" / "testbed_words.yaml"
            command = [sys.executable, "-m", "solrl_ray", "eval", str(folder), "--rewards", str(rewards)]
            subprocess.run([*command, "--out", str(folder / "words"), "--no-live"], check=True, cwd=REPOSITORY)


def reached(run: Mapping[str, Any], reward: float) -> float:
    """Iterations until a held-out reward; infinite if never."""
    names = ("iterations", "seconds", "reward", "stderr")
    points = tuple(Point(*values) for values in zip(*(run[name] for name in names), strict=True))
    found = Curve(points, gpus=0.0).reaches(reward)
    return found.updates if found else float("inf")


def comparisons(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each variant beside its method's `direct`: iterations to each target, and how many times sooner in charged
    seconds, with a bootstrap interval over seeds."""
    runs, prices = results["runs"], results["charged"]
    found = {}
    for name, of_seed in runs.items():
        reference = next((n for n in (name.replace("_two_stage", "_direct"), "direct") if n in runs), None)
        if reference is None:
            continue
        beside = list(runs[reference].values())
        base = statistics.fmean(run["reward"][0] for run in beside)
        gain = statistics.fmean(run["reward"][-1] for run in beside) - base
        rows = {}
        for share in TARGETS:
            mine = np.array([reached(run, base + share * gain) for run in of_seed.values()])
            other = np.array([reached(run, base + share * gain) for run in beside])
            rows[f"{share:g}"] = {
                "iterations": _mean(mine),
                "reached": int(np.isfinite(mine).sum()),
                "times_sooner": {
                    model: _ratio(other * prices[reference][model], mine * prices[name][model]) for model in MODELS
                },
            }
        found[name] = {
            "reference": reference,
            "targets": rows,
            "final": _interval([r["reward"][-1] for r in of_seed.values()]),
        }
    return found


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if np.isfinite(values).all() else None


def _ratio(reference: np.ndarray, mine: np.ndarray) -> list[float] | None:
    """Of the means, with a bootstrap interval over seeds; None where one has not come so far."""
    if not (np.isfinite(reference).all() and np.isfinite(mine).all() and mine.all()):
        return None
    random = np.random.default_rng(0)
    drawn = [random.choice(each, (RESAMPLES, len(each))).mean(axis=1) for each in (reference, mine)]
    low, high = np.quantile(drawn[0] / drawn[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return [float(reference.mean() / mine.mean()), float(low), float(high)]


def _interval(values: Sequence[float]) -> list[float]:
    """Mean and half width of its 95 % interval by Student's t; the width is 0 for one value."""
    student = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
    width = student.get(len(values), 1.96) * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return [statistics.fmean(values), width]


def show(results: Mapping[str, Any]) -> None:
    print(
        "| variant | n | final reward | words that hold | iterations to 50 / 75 / 90 / 100 % | × sooner, FLUX.1-dev |"
    )
    print("|---|---|---|---|---|---|")
    for name, found in results["comparisons"].items():
        of_seed, targets = list(results["runs"][name].values()), found["targets"].values()
        words = [run["words"]["ema"] for run in of_seed if run["words"]]
        steps = " / ".join("–" if t["iterations"] is None else f"{t['iterations']:.1f}" for t in targets)
        sooner = " / ".join("–" if (r := t["times_sooner"]["flux1_dev"]) is None else f"{r[0]:.2f}" for t in targets)
        held = f"{statistics.fmean(words):.3f}" if words else "–"
        mean, width = found["final"]
        print(f"| {name} | {len(of_seed)} | {mean:.3f} ± {width:.3f} | {held} | {steps} | {sooner} |")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Mean and 95 % interval over seeds, against iterations and against charged hours."""
    figure, (by_iteration, by_hour) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for name, of_seed in results["runs"].items():
        common = min(len(run["iterations"]) for run in of_seed.values())
        steps = np.array(next(iter(of_seed.values()))["iterations"][:common])
        found = [
            _interval(values) for values in zip(*(run["reward"][:common] for run in of_seed.values()), strict=True)
        ]
        mean, width = np.array(found).T
        for axes, x in ((by_iteration, steps), (by_hour, steps * results["charged"][name]["flux1_dev"] / 3600)):
            line = axes.plot(x, mean, label=f"{name} (n = {len(of_seed)})")[0]
            axes.fill_between(x, mean - width, mean + width, alpha=0.2, color=line.get_color())
    by_iteration.set_xlabel("iterations")
    by_hour.set_xlabel("hours of one H200, charged as FLUX.1-dev")
    by_iteration.set_ylabel("held-out reward (CLIPScore of the testbed)")
    by_iteration.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs side by side; each wants three cores")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop what still trains after so long")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--judge", action="store_true", help="evaluate finished runs by the testbed's rules")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run of this call")
    parser.add_argument("--root", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file that is added to")
    arguments = parser.parse_args()
    # Seed by seed, so that a campaign that is cut short has as many seeds of every variant.
    jobs = {(name, 42 + n): job(name, 42 + n, arguments) for n in range(arguments.seeds) for name in arguments.only}
    prices = {name: charged(name, arguments) for name in arguments.only}
    train_all(list(jobs.values()), at_once=arguments.at_once, seconds=arguments.seconds)
    if arguments.judge:
        judge(list(jobs.values()))
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {"runs": {}, "charged": {}}
    for (name, seed), each in jobs.items():
        if found := curve(RunFolder.of(each.config).path):
            results["runs"].setdefault(name, {})[str(seed)] = found
    if not results["runs"]:
        sys.exit("no run has a second evaluation yet")
    results["runs"] = {name: results["runs"][name] for name in VARIANTS if name in results["runs"]}
    results["charged"] |= prices
    results["comparisons"] = comparisons(results)
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    show(results)
    draw(results, PICTURE)


if __name__ == "__main__":
    main()
