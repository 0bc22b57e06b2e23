"""The whole loop on the GPUs of one host: seconds by stage, beside what `solrl plan` says, one variant a command.

    python benchmarks/many_gpus.py flux --gpus 2 [--placement split] [--staleness 1] [--prompts 12]
    python benchmarks/many_gpus.py flux --gpus 2 --layers 1 --set run.deterministic=true
    python benchmarks/many_gpus.py testbed --gpus 0 --prompts 4       # on a CPU: proves the script, and no more
    python benchmarks/many_gpus.py flux_kontext --gpus 1 --prompts 2  # prompts with reference pictures, of the testbed
    python benchmarks/many_gpus.py flux --plan h100-80                # what `solrl plan` says of 1, 2, 4 and 8 GPUs

The architecture has its published size and random weights (`full_size.py`), unless `--layers` cuts its depth. A prompt
has 96 seeds, of which 24 are kept; previews in FP8 are pruned, as in the shipped parts. The rest is of the part of
configs/clusters for one such card. By `--placement`:

    colocated   each GPU has one process, which explores, regenerates and learns
    split       half of the GPUs host an explorer and a regenerator each, the other half a learner rank each

`--staleness 1` explores one iteration ahead, which needs `split`. The last iteration counts: the first one compiles,
and with staleness the last one but one, since the last explores nothing ahead. `busy` is the share of it in which a GPU
ran any kernel. `planned` is what `solrl plan` says of the run. `fixed` is what neither rollout nor update took.
`seconds_48_prompts` is computed for `colocated`: rollout and update by prompts, and the rest once. `idle_explorers` had
nothing to do in that iteration: of such a row only the update counts.

Prints the row; adds it to many_gpus.json in `--out`, in place of the same variant's with the same `--set`. A run that
takes longer than `--seconds` is stopped and gives no row. `--plan CARD` runs nothing: it adds the seconds of an
iteration of 48 prompts to many_gpus_planned.json.
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
"""Of a GPU, by placement and role."""
SMALLER = 100.0
"""GB of a card's memory below which it has the part for cards of 80 GB."""
HOSTS = (1, 2, 4, 8)
"""GPUs of the hosts that a plan is made for."""
PUBLISHED_PROMPTS = 48


def memory() -> float:
    """GB of a GPU."""
    return torch.cuda.mem_get_info()[1] / 1e9 if gpus() else 0.0


def variant(arguments: argparse.Namespace) -> str:
    """The name of its row and of its run."""
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
    """How many, which is also the number of regenerators and of learner ranks."""
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
    """Run it from its beginning; what was measured. Exits if it fails."""
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
    """Seconds of an iteration of 48 prompts, from those of one with `prompts`."""
    of_prompts = stages["rollout"] + stages["update"]
    return stages["total"] + (PUBLISHED_PROMPTS / prompts - 1) * of_prompts


def planned(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of such an iteration by `solrl plan --gpu`, with the card's price list; empty on a CPU, and for a model
    without prices, whose run is worth keeping.
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
    """What `solrl plan` says of an iteration on `count` of these cards."""
    prices, cluster = price_list(card), Cluster(gpu=card, gpus_per_node=count)
    assert prices.device is not None
    arithmetic = fitting.check(describe(fitting.resolve_auto(config, facts, prices.device), facts), prices.device)
    made = forecast(arithmetic, prices, cluster, orchestration())
    peaks = [round(card.peak / 1e9, 1) for card in gpu_memories(arithmetic)]
    offload = bool(arithmetic.config.fleet.offload)
    return {"prices": card, "seconds": made.seconds, "parts": made.parts, "offload": offload, "peak_gb": peaks}


def plan(arguments: argparse.Namespace) -> None:
    """Forecasts of the published iteration, of the published checkpoint's shapes, on hosts of several sizes."""
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
    """What the run has written down, with what the cards decided."""
    return compiled_learner.resolve_auto(load([run_folder(arguments) / "config.yaml"]))


def add(row: dict[str, Any], file: Path, of: Sequence[str]) -> None:
    """Add a row, in place of the one that has the same `of`."""
    rows = json.loads(file.read_text()) if file.exists() else []
    write(file, [*(each for each in rows if any(each[key] != row[key] for key in of)), row])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*MODELS, "testbed"])
    parser.add_argument("--gpus", type=int, help="of this host")
    parser.add_argument("--plan", metavar="CARD", help="forecast 48 prompts on such cards, and run nothing")
    parser.add_argument("--placement", choices=SHARES, default="colocated")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0)
    parser.add_argument("--prompts", type=int, help="default: 12, of a plan 48")
    parser.add_argument("--iterations", type=int, help="default: 2, with staleness 4")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of the run, its start included")
    parser.add_argument("--part", help="of configs/clusters, such as one_gpu_48gb; default: by the card's memory")
    options(parser)
    arguments = parsed(parser, argv)
    arguments.iterations = arguments.iterations or (4 if arguments.staleness else 2)
    arguments.prompts = arguments.prompts or (PUBLISHED_PROMPTS if arguments.plan else 12)
    if arguments.plan:
        if arguments.layers or arguments.gpus:
            parser.error("--plan is of all layers on 1, 2, 4 and 8 GPUs: leave out --layers, --gpus")
        return plan(arguments)
    if arguments.gpus is None:
        parser.error("--gpus is missing: how many of this host's GPUs")
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
