"""Whole iterations on the GPUs of one host: seconds per stage, compared with `solrl plan`. One variant per command.

    python benchmarks/many_gpus.py flux --gpus 2 [--placement split] [--staleness 1] [--prompts 12]
    python benchmarks/many_gpus.py flux --gpus 2 --layers 1 --set run.deterministic=true
    python benchmarks/many_gpus.py testbed --gpus 0 --prompts 4       # on a CPU: only tests the script
    python benchmarks/many_gpus.py flux_kontext --gpus 1 --prompts 2  # prompts with reference images of the testbed
    python benchmarks/many_gpus.py flux --plan h100-80                # forecasts of `solrl plan` for 1, 2, 4 and 8 GPUs

The architecture has its published size and random weights (`full_size.py`); `--layers` reduces its depth. A prompt has
96 seeds, of which 24 are kept; previews in FP8 are pruned, as in the shipped presets. All other settings are those of
the preset in configs/clusters for one such GPU. `--placement`:

    colocated   each GPU has one process, which explores, regenerates and learns
    split       half of the GPUs host an explorer and a regenerator each, the other half a learner rank each

`--staleness 1` explores one iteration ahead, which needs `split`. The last iteration is measured, because the first one
compiles; with staleness it is the last but one, because the last explores nothing ahead. Keys of a row:

    busy                 share of the iteration in which a GPU ran any kernel
    planned              forecast of `solrl plan` for the run
    fixed                time of the iteration outside rollout and update
    seconds_48_prompts   for `colocated`: rollout and update scaled to 48 prompts, plus `fixed`
    idle_explorers       explorers without work in the iteration; if there are any, only the update is meaningful

Prints the row and adds it to many_gpus.json in `--out`, where it replaces the row of the same variant and `--set`. A
run that takes longer than `--seconds` is stopped and gives no row. `--plan GPU` runs nothing: it adds the forecast for
an iteration of 48 prompts to many_gpus_planned.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import CONFIGS, MODELS, PRUNED, SOL_RL, checkpoints, gpus, make, options, parsed, run_until, write
from phases import read_spans
from watches import Watch

from solrl_ray.config import compiled_learner
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import UserError
from solrl_ray.models.shapes import shipped
from solrl_ray.planning import fitting
from solrl_ray.planning.arithmetic import ModelFacts, describe
from solrl_ray.planning.forecast import forecast
from solrl_ray.planning.gpu_memory import gpu_memories
from solrl_ray.planning.model_facts import model_facts
from solrl_ray.planning.outline import facts_of
from solrl_ray.planning.prices import Cluster, orchestration, price_list

STAGES = ("ahead", "explore", "regenerate", "learn", "checkpoint", "publish", "total")
SHARES: dict[str, dict[str, float]] = {
    "colocated": {"explorers": 1.0, "regenerators": 1.0, "learners": 1.0},
    "split": {"explorers": 0.5, "regenerators": 0.5, "learners": 1.0},
}
"""Placement → role → share of a GPU per worker."""
SMALLER = 100.0
"""GB of GPU memory below which the preset for 80 GB is used."""
HOSTS = (1, 2, 4, 8)
"""Numbers of GPUs to plan for."""
PUBLISHED_PROMPTS = 48


def memory() -> float:
    """GB of memory per GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info()[1] / 1e9 if gpus() else 0.0


def variant(arguments: argparse.Namespace) -> str:
    """Name of the variant's row and run."""
    parts = [arguments.model, f"{arguments.gpus}-gpus", arguments.placement, f"staleness-{arguments.staleness}"]
    parts += [f"{arguments.prompts}-prompts"]
    return "_".join([*parts, *([f"{arguments.layers}-layers"] if arguments.layers else [])])


def files(arguments: argparse.Namespace) -> list[Path]:
    if arguments.model == "testbed":
        return [CONFIGS / "demo.yaml"]
    part = arguments.part or ("one_gpu_80gb" if memory() < SMALLER else "one_gpu")
    return [
        SOL_RL,
        CONFIGS / "models" / MODELS[arguments.model],
        CONFIGS / "clusters" / f"{part}.yaml",
    ]


def explorers(arguments: argparse.Namespace) -> int:
    """Number of explorers, which equals the number of regenerators and of learner ranks."""
    return max(1, arguments.gpus // 2 if arguments.placement == "split" else arguments.gpus)


def settings(arguments: argparse.Namespace) -> list[str]:
    shares, each = SHARES[arguments.placement], explorers(arguments)
    gpu = {role: f"num_gpus: {share if arguments.gpus else 0}" for role, share in shares.items()}
    threads = 4 if arguments.gpus else 1
    common = [
        f"run={{name: {variant(arguments)}, root: '{arguments.work / 'runs'}', iterations: {arguments.iterations}}}",
        f"rollout={{prompts: {arguments.prompts}, max_staleness: {arguments.staleness}}}",
        f"fleet.explorers={{count: {each}, {gpu['explorers']}, threads: {threads}}}",
        f"fleet.regenerators={{count: {each}, {gpu['regenerators']}, threads: {threads}}}",
        f"fleet.learners={{{gpu['learners']}, threads: {threads}}}",
        f"fleet.placement={arguments.placement}",
        f"learner.world_size={each}",
        "evaluation={prompts: 1, samples: 1, steps: 2, pictures: 0}",
    ]
    if arguments.model != "testbed":
        common += [
            *checkpoints(arguments.model, arguments.work),
            *PRUNED,
            "rollout.explore.precision=fp8",
            "fleet.deadlines={start: 600, explore: 600, regenerate: 600}",
        ]
    return [*common, *arguments.set]


def run_folder(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.work / "runs" / variant(arguments)
    return folder


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the variant from scratch; returns the measurements. Exits if the run fails."""
    command: list[str | Path] = [sys.executable, "-m", "solrl_ray", "train", "--no-live", *files(arguments)]
    for setting in settings(arguments):
        command += ["--set", setting]
    shutil.rmtree(run_folder(arguments), ignore_errors=True)
    watch, began = Watch(), time.perf_counter()
    watch.start()
    try:
        status = run_until(command, arguments.seconds)
    finally:
        watch.stop()
    if status is None:
        raise SystemExit(f"{variant(arguments)} took longer than --seconds, {arguments.seconds:g}")
    if status:
        raise SystemExit(f"{variant(arguments)} ended with status {status}")
    return {"wall": round(time.perf_counter() - began, 1)} | collect(arguments, watch)


def collect(arguments: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    folder = run_folder(arguments)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    iterations = [record for record in records if record["event"] == "iteration"]
    counted = iterations[-1 - arguments.staleness]
    during = [span for span in read_spans(folder) if span.iteration == counted["iteration"] and span.stage != "report"]
    (rollout,) = (span for span in during if span.stage == "rollout")
    seconds = {stage: round(counted["seconds"].get(stage, 0.0), 2) for stage in STAGES}
    seconds |= {"rollout": round(rollout.seconds, 2), "update": round(counted["busy_seconds"]["learn"], 2)}
    explored = [span for span in during if span.kind == "unit" and span.stage == "explore"]
    at_work = {span.worker.partition(".")[0] for span in explored}  # explorer-0.1 took explorer-0's place
    colocated = arguments.placement == "colocated"
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "seconds": seconds,
        "fixed": round(seconds["total"] - seconds["rollout"] - seconds["update"], 2),
        "seconds_48_prompts": round(published(seconds, arguments.prompts), 1) if colocated else None,
        "busy_seconds": counted["busy_seconds"],
        "refresh": counted["publication"]["load_seconds"],
        "explorers_wait_for_weights": counted["weights_wait"],
        "busy": watch.busy(rollout.started, rollout.started + seconds["total"]),
        "peak_gb": watch.peaks(),
        "first_iteration": iterations[0]["seconds"],
        "idle_explorers": min(explorers(arguments), len(explored)) - len(at_work),
        "requeued_units": summary["requeued_units"],
        "digests": {"selection": summary["selection_digest"], "lora": summary["lora_digest"]},
    }


def published(stages: dict[str, float], prompts: int) -> float:
    """Seconds of an iteration of 48 prompts, extrapolated from one with `prompts`."""
    of_prompts = stages["rollout"] + stages["update"]
    return stages["total"] + (PUBLISHED_PROMPTS / prompts - 1) * of_prompts


def planned(arguments: argparse.Namespace) -> dict[str, Any]:
    """Forecast of the iteration by `solrl plan --gpu`, with the GPU's price list. Empty on a CPU and for a model
    without prices, so that its measurements are kept.
    """
    if not arguments.gpus or arguments.layers:
        return {}
    config = stored(arguments)
    try:
        return forecasted(config, model_facts(config), "h100-80" if memory() < SMALLER else "h200", arguments.gpus)
    except UserError as error:
        print(f"no plan: {error}", flush=True)
        return {}


def forecasted(config: Config, facts: ModelFacts, card: str, count: int) -> dict[str, Any]:
    """Forecast of `solrl plan` for an iteration on `count` GPUs of the kind `card`."""
    prices, cluster = price_list(card), Cluster(gpu=card, gpus_per_node=count)
    assert prices.device is not None
    arithmetic = fitting.check(describe(fitting.resolve_auto(config, facts, prices.device), facts), prices.device)
    made = forecast(arithmetic, prices, cluster, orchestration())
    peaks = [round(card.peak / 1e9, 1) for card in gpu_memories(arithmetic)]
    offload = bool(arithmetic.config.fleet.offload)
    return {"prices": card, "seconds": made.seconds, "parts": made.parts, "offload": offload, "peak_gb": peaks}


def plan(arguments: argparse.Namespace) -> None:
    """Add and print forecasts of the published iteration, with the published checkpoint's shapes, for `HOSTS`."""
    for count in HOSTS:
        arguments.gpus = count
        given = [text for text in settings(arguments) if not text.startswith("model.path")]
        config = compiled_learner.resolve_auto(load(files(arguments), given))
        shapes = shipped(config.model)
        assert shapes is not None
        facts = facts_of(config, Sources(), shapes, pool_sampling(config).tier)
        made = forecasted(config, facts, arguments.plan, count)
        row = {"model": arguments.model, "gpus": count, "prompts": arguments.prompts, "placement": arguments.placement}
        add(row | made, arguments.out / "many_gpus_planned.json", of=(*row, "prices"))
        print(f"{arguments.model} on {count} {arguments.plan}: {made['seconds']:.1f} s", flush=True)


def stored(arguments: argparse.Namespace) -> Config:
    """The run's stored configuration, with the settings that depend on its GPUs."""
    return compiled_learner.resolve_auto(load([run_folder(arguments) / "config.yaml"]))


def add(row: dict[str, Any], file: Path, of: Sequence[str]) -> None:
    """Add a row to the file; it replaces the row with the same values of the keys `of`."""
    rows = json.loads(file.read_text()) if file.exists() else []
    write(file, [*(each for each in rows if any(each[key] != row[key] for key in of)), row])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*MODELS, "testbed"])
    parser.add_argument("--gpus", type=int, help="number of this host's GPUs")
    parser.add_argument("--plan", metavar="GPU", help="forecast 48 prompts on such GPUs, without a run")
    parser.add_argument("--placement", choices=SHARES, default="colocated")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0)
    parser.add_argument("--prompts", type=int, help="default: 12, for --plan 48")
    parser.add_argument("--iterations", type=int, help="default: 2, with staleness 4")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit of the run, including its start")
    parser.add_argument("--part", help="preset in configs/clusters, such as one_gpu_48gb; default: by GPU memory")
    options(parser)
    arguments = parsed(parser, argv)
    arguments.iterations = arguments.iterations or (4 if arguments.staleness else 2)
    arguments.prompts = arguments.prompts or (PUBLISHED_PROMPTS if arguments.plan else 12)
    if arguments.plan:
        if arguments.layers or arguments.gpus:
            parser.error("--plan forecasts all layers on 1, 2, 4 and 8 GPUs; leave out --layers and --gpus")
        return plan(arguments)
    if arguments.gpus is None:
        parser.error("--gpus is missing; give the number of this host's GPUs to use")
    if arguments.model != "testbed":
        make(arguments.model, arguments.work, arguments.layers)
    keys = ("model", "gpus", "placement", "staleness", "prompts", "layers", "set")
    row = {"variant": variant(arguments)} | {key: getattr(arguments, key) for key in keys}
    row |= {"device": torch.cuda.get_device_name() if gpus() else "CPU", "torch": torch.__version__}
    row |= train(arguments) | {"planned": planned(arguments)}
    row["activation_memory"] = stored(arguments).learner.activation_memory
    add(row, arguments.out / "many_gpus.json", of=("variant", "set"))
    stages = "  ".join(f"{stage} {row['seconds'][stage]:.1f}" for stage in STAGES)
    print(
        f"{row['variant']}: {stages}; planned {row['planned'].get('seconds', 0.0):.1f}; busy {row['busy']}", flush=True
    )


if __name__ == "__main__":
    main()
