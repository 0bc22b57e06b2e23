"""Does a variant reach a better model sooner? Held-out reward against iterations and charged time, variants × seeds.

    python benchmarks/convergence.py [--table pool] [--only direct two_stage_fp8 …] [--seeds 5] [--iterations 40]
                                     [--at-once 8] [--seconds 480] [--gpu] [--judge]
                                     [--set KEY=VALUE …] [--root runs/convergence] [--results FILE]

Every run is `solrl train` on the testbed without Ray (`one_process.py`), which leaves a GPU less idle: 12 prompts an
iteration, and what a variant of `variants.py` sets. `--table` names rows that are compared; `convergence`, the default,
has strategies and methods. `--at-once` runs train side by side; after `--seconds` what still trains is stopped. A begun
run goes on where it was, so the same command completes the campaign by (variant, seed), and rows that tables share are
trained once. What the results file has needs no folder any more. A run that was cut short is in the file, but only
whole ones are compared. `--judge` has each finished run evaluated by the testbed's own rules, which no policy was
trained on.

*Charged* seconds are what an iteration of that shape takes on one H200 with a published model, by the shipped price
list and `solrl plan`; exploring ahead saves nothing there. NVFP4 previews are charged at the price of FP8:
a Hopper card has no FP4 unit. The baselines `direct` and `scaled` are charged compiled, as everything else; `released`
is what `direct` takes in the released code's schedule (`iteration.py`), where nothing is compiled.

Prints the table; adds to benchmarks/results/convergence.json, or to the file of `--results`, whose runs all have as
many iterations: a gain is that of the last one. `make results` draws it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from campaign import ON_ONE_GPU, REPOSITORY, Job, train_all
from iteration import by_schedule
from time_to_target import comparisons, row, whole_runs
from variants import TABLES, VARIANTS

from solrl_ray.config.arithmetic import ModelFacts, describe
from solrl_ray.config.loading import load
from solrl_ray.forecasts.forecast import Forecast, forecast
from solrl_ray.forecasts.prices import Cluster, orchestration, price_list
from solrl_ray.report.curve import SHARES, Curve
from solrl_ray.report.data import read_run
from solrl_ray.storage.run_folder import RunFolder

CONFIGS = REPOSITORY / "configs"
RESULTS = REPOSITORY / "benchmarks" / "results" / "convergence.json"
PROMPTS = 12
SAME = (
    f"rollout.prompts={PROMPTS}",
    "rollout.regenerate.micro_batch=24",
    "learner={micro_batch: 24, optimizer: {lr: 1e-3}}",
    "evaluation={every: 4, prompts: 96, samples: 4, steps: 10, pictures: 0, reference: ''}",
)
"""Of every run: the demo's number of prompts and learning rate, and all held-out prompts."""
MODELS = {
    "flux1_dev": ModelFacts(
        latent_shape=(16, 64, 64),
        parameters=11_901_408_320,
        lora_modules=304,
        lora_parameters=74_711_040,
        packed_bytes=0,
        quantized_parameters=8_604_718_215,  # 72.3 % (rollout_flux.json)
        touched_parameters=1_793_064_960,
    ),
    "sd35_large": ModelFacts(
        latent_shape=(16, 128, 128),
        parameters=8_056_627_520,
        lora_modules=300,
        lora_parameters=47_185_920,
        packed_bytes=0,
        quantized_parameters=1_796_627_937,  # 22.3 % (rollout_sd3.json)
        touched_parameters=1_792_131_072,
    ),
}
"""Whose prices are charged; sizes of the published checkpoints."""


class Released(NamedTuple):
    """A model's schedule in the released code."""

    measured: str
    """Its name in `iteration.py`."""
    activation_memory: float
    """0 with gradient checkpointing, else 1."""


RELEASED = {"flux1_dev": Released("flux", 0), "sd35_large": Released("sd3", 1)}


def job(name: str, seed: int, arguments: argparse.Namespace) -> Job:
    variant, root = VARIANTS[name], arguments.root.absolute()
    return Job(
        (CONFIGS / "demo.yaml", CONFIGS / "methods" / f"{variant.method}.yaml"),
        (
            *SAME,
            *variant.settings,
            f"run={{name: {name}-{seed}, root: '{root}', seed: {seed}, iterations: {arguments.iterations}}}",
            *((*ON_ONE_GPU, *variant.on_gpu) if arguments.gpu else ()),
            *arguments.set,
        ),
    )


def charged(name: str, arguments: argparse.Namespace, *, compiled: bool = True) -> dict[str, float]:
    """Seconds of an iteration of a variant's shape on one H200, by model.

    Args:
        compiled: whether the learner is; else it is the released one.
    """
    variant, found = VARIANTS[name], {}
    for model, facts in MODELS.items():
        # The method last: a model file has settings for DiffusionNFT.
        files = (CONFIGS / "demo.yaml", CONFIGS / f"models/{model}.yaml", CONFIGS / f"methods/{variant.method}.yaml")
        shape = (
            *SAME,
            *variant.settings,
            *arguments.set,
            "fleet={placement: colocated, explorers: {count: 1, num_gpus: 1}, regenerators: {count: 1, num_gpus: 1}}",
            "fleet={learners: {num_gpus: 1}}",
            f"compile={{enabled: true, learner: {str(compiled).lower()}}}",
            f"learner.activation_memory={0.5 if compiled else RELEASED[model].activation_memory}",
            "rollout.max_staleness=0",  # one card explores or learns
            *([f"rollout.explore.precision={variant.charged_as}"] if variant.charged_as else []),
        )
        found[model] = priced(files, shape, facts).seconds
    return found


def priced(files: Sequence[Path], settings: Sequence[str], facts: ModelFacts, gpu: str = "h200") -> Forecast:
    config = load(files, settings)
    arithmetic = describe(config, facts)
    return forecast(arithmetic, price_list(gpu), Cluster(gpu=gpu), orchestration(), advise=False)


def released(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of an iteration of `direct` on one H200 as in the released code, by model: sampling and learner eager."""
    found = charged("direct", arguments, compiled=False)
    for model, schedule in RELEASED.items():
        measured = by_schedule(RESULTS.parent, schedule.measured)
        assert measured is not None
        sampling = (measured["seconds"][name]["regenerate"] for name in ("released two-stage", "ours"))
        found[model] += PROMPTS * (next(sampling) - next(sampling))  # of 24 samples each
    return found


def curve(folder: Path, iterations: int) -> dict[str, Any] | None:
    """Held-out reward of a run's first `iterations` by updates made; None before the second evaluation."""
    if not RunFolder(folder).begun:
        return None
    run = read_run(folder)
    points = [point for point in Curve.of(run).points if point.updates <= iterations]
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


def is_whole(run: Mapping[str, Any] | None, arguments: argparse.Namespace) -> bool:
    """Whether the results file has all of a run, whose folder is not needed then."""
    if run is None or run["iterations"][-1] < arguments.iterations:
        return False
    return bool(run["words"] or not arguments.judge)


def judge(each: Job) -> list[str] | None:
    """The command that evaluates a finished run by the words that hold; None if that was done."""
    folder = RunFolder.of(each.config).path
    if (folder / "words" / "evaluation.json").is_file():
        return None
    rewards = CONFIGS / "rewards" / "testbed_words.yaml"
    command = [sys.executable, "-m", "solrl_ray", "eval", str(folder), "--rewards", str(rewards)]
    return [*command, "--out", str(folder / "words"), "--no-live"]


def show(results: Mapping[str, Any], names: Sequence[str]) -> None:
    steps_of = " / ".join(f"{share:.0%}" for share in SHARES)
    print(f"| variant | n | final reward | words that hold | iterations to {steps_of} | × sooner, FLUX.1-dev |")
    print("|---|---|---|---|---|---|")
    whole = whole_runs(results)
    for name in (name for name in names if name in results["comparisons"]):
        print(f"| {' | '.join(cell or '–' for cell in (name, *row(results, name)))} |")
    if cut := sum(len(runs) - len(whole.get(name, {})) for name, runs in results["runs"].items()):
        print(f"Not compared: {cut} of the file's runs, cut short before iteration {results['iterations']}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=TABLES, default="convergence")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help="variants, instead of a table's")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop what still trains after so long")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--judge", action="store_true", help="evaluate finished runs by the testbed's rules")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run of this call")
    parser.add_argument("--root", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file that is added to")
    arguments = parser.parse_args()
    names = arguments.only or TABLES[arguments.table]
    results: dict[str, Any] = {"iterations": arguments.iterations, "runs": {}, "charged": {}}
    if arguments.results.exists():
        results = json.loads(arguments.results.read_text())
    if results["iterations"] != arguments.iterations:
        made = f"{arguments.results} holds runs of {results['iterations']}"
        sys.exit(f"--iterations is {arguments.iterations}, but {made}; name another file with --results.")
    # Seed by seed, so that a campaign that is cut short has as many seeds of every variant.
    wanted = [(name, 42 + n) for n in range(arguments.seeds) for name in names]
    jobs = {
        (name, seed): job(name, seed, arguments)
        for name, seed in wanted
        if not is_whole(results["runs"].get(name, {}).get(str(seed)), arguments)
    }
    prices = {name: charged(name, arguments) for name in names}
    train_all(
        list(jobs.values()),
        at_once=arguments.at_once,
        seconds=arguments.seconds,
        after=judge if arguments.judge else lambda job: None,
    )
    for (name, seed), each in jobs.items():
        if found := curve(RunFolder.of(each.config).path, arguments.iterations):
            results["runs"].setdefault(name, {})[str(seed)] = found
    if not results["runs"]:
        sys.exit("no run has a second evaluation yet")
    results["runs"] = {name: results["runs"][name] for name in VARIANTS if name in results["runs"]}
    results["charged"] |= prices
    results["released"] = released(arguments)
    results["comparisons"] = comparisons(whole_runs(results), results["charged"])
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    show(results, names)


if __name__ == "__main__":
    main()
