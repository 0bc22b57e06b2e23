"""The whole loop on the GPUs of one host: seconds by stage, beside what `solrl plan` says, one variant a command.

    python benchmarks/many_gpus.py flux --gpus 2 [--placement split] [--staleness 1] [--zero 2] [--prompts 12]
    python benchmarks/many_gpus.py flux --gpus 2 --layers 1 --set run.deterministic=true [--kill]
    python benchmarks/many_gpus.py testbed --gpus 0 --prompts 4       # on a CPU: proves the script, and no more
    python benchmarks/many_gpus.py flux --plan h100-80                # what `solrl plan` says of 1, 2, 4 and 8 GPUs

The architecture has its published size and random weights (`full_size.py`), unless `--layers` cuts its depth. A prompt
has 96 seeds, of which 24 are kept; previews in FP8 are pruned, as in the shipped parts. The rest is of the part of
configs/clusters for one such card. By `--placement`:

    colocated   each GPU has one process, which explores, regenerates and learns
    split       half of the GPUs host an explorer and a regenerator each, the other half a learner rank each

`--staleness 1` explores one iteration ahead, which needs `split`. `--kill` kills an explorer in the second iteration.
The last iteration counts: the first one compiles, and with staleness the last one but one, since the last explores
nothing ahead. `busy` is the share of it in which a GPU ran any kernel (nvidia-smi, twice a second). `all_reduce` is
what NCCL takes for a LoRA gradient between all ranks, measured apart. `planned` is what `solrl plan` says of the run.
`fixed` is what neither rollout nor update took. `seconds_48_prompts` is computed for `colocated`: rollout and update by
prompts, and the rest once. `idle_explorers` had nothing to do in that iteration: of such a row only the update counts.

Prints the row; adds it to many_gpus.json in `--out`, in place of the same variant's with the same `--set`. A run that
takes longer than `--seconds` is stopped and gives no row. Nor does one with `--kill` in which nothing was killed.
`--plan CARD` runs nothing: it adds the seconds of an iteration of 48 prompts to many_gpus_planned.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from full_iteration import CONFIGS, HERE, MODELS, make
from memory_limit import PUBLISHED_PROMPTS, published
from overlap import SHARES
from torch.multiprocessing.spawn import spawn

from solrl_ray.cli.outline import facts_of
from solrl_ray.cli.preflight import model_facts
from solrl_ray.common import ray_auth
from solrl_ray.config import compiled_learner, fitting
from solrl_ray.config.arithmetic import ModelFacts, describe
from solrl_ray.config.card_memory import cards
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.forecasts.forecast import forecast
from solrl_ray.forecasts.prices import Cluster, orchestration, price_list
from solrl_ray.learning.engine import free_port
from solrl_ray.models.shapes import shipped
from solrl_ray.report.trace import Span

STAGES = ("ahead", "explore", "regenerate", "learn", "checkpoint", "publish", "total")
SMALLER = 100.0
"""GB of a card's memory below which it has the part for cards of 80 GB."""
HOSTS = (1, 2, 4, 8)
"""GPUs of the hosts that a plan is made for."""
KILLED_AFTER = 2.0
"""Seconds of the second iteration."""
REDUCTIONS = 20
STOP_SECONDS = 60.0
STATE_SECONDS = 20
"""For an answer of Ray's dashboard."""


class Watch(threading.Thread):
    """Use and memory of each GPU over time, from nvidia-smi."""

    QUERY = (
        "nvidia-smi",
        "--query-gpu=index,utilization.gpu,memory.used",
        "--format=csv,noheader,nounits",
        "-lms",
        "500",
    )

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, int, float, float]] = []
        """Time since 1970, GPU, percent, MiB."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        command = [*self.QUERY, *(["-i", seen] if seen else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if gpus() else None

    def run(self) -> None:
        for line in self._process.stdout or () if self._process else ():
            index, used, memory = line.split(",")
            self.seen.append((time.time(), int(index), float(used), float(memory)))

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()

    def busy(self, began: float, ended: float) -> list[float]:
        """Share of that time in which a GPU ran a kernel, by GPU."""
        shares: defaultdict[int, list[float]] = defaultdict(list)
        for at, index, used, _ in self.seen:
            if began <= at <= ended:
                shares[index].append(used / 100)
        return [round(statistics.fmean(shares[index]), 3) for index in sorted(shares)]

    def peaks(self) -> list[float]:
        """GB, by GPU."""
        most: defaultdict[int, float] = defaultdict(float)
        for _, index, _, memory in self.seen:
            most[index] = max(most[index], memory * 2**20 / 1e9)
        return [round(most[index], 1) for index in sorted(most)]


def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def memory() -> float:
    """GB of a GPU."""
    return torch.cuda.mem_get_info()[1] / 1e9 if gpus() else 0.0


def variant(arguments: argparse.Namespace) -> str:
    """The name of its row and of its run."""
    parts = [arguments.model, f"{arguments.gpus}-gpus", arguments.placement, f"staleness-{arguments.staleness}"]
    parts += [f"zero-{arguments.zero}", f"{arguments.prompts}-prompts"]
    parts += [f"{arguments.layers}-layers"] if arguments.layers else []
    return "_".join([*parts, *(["killed"] if arguments.kill else [])])


def files(arguments: argparse.Namespace) -> list[Path]:
    if arguments.model == "testbed":
        return [CONFIGS / "demo.yaml"]
    return [
        *(CONFIGS / name for name in ("methods/sol_rl.yaml", f"models/{MODELS[arguments.model]}")),
        CONFIGS / "clusters" / ("one_gpu_80gb.yaml" if memory() < SMALLER else "one_gpu.yaml"),
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
        f"learner={{world_size: {each}, zero_stage: {arguments.zero}}}",
        "evaluation={prompts: 1, samples: 1, steps: 2, pictures: 0}",
    ]
    if arguments.model != "testbed":
        common += [
            f"model.path='{arguments.work / arguments.model}'",
            f"rewards=[{{kind: clipscore, path: '{arguments.work / 'clip'}'}}]",
            "prompts={train: builtin:testbed/prompts/train.txt, heldout: builtin:testbed/prompts/heldout.txt}",
            "rollout.explore.precision=fp8",
            "fleet.deadlines={start: 600, explore: 600, regenerate: 600}",
        ]
    return [*common, *arguments.set]


def train(arguments: argparse.Namespace) -> None:
    command: list[str | Path] = [sys.executable, "-m", "solrl_ray", "train", "--no-live", *files(arguments)]
    for setting in settings(arguments):
        command += ["--set", setting]
    folder = arguments.work / "runs" / variant(arguments)
    shutil.rmtree(folder, ignore_errors=True)
    process, killed = subprocess.Popen(command), threading.Event()
    if arguments.kill:
        threading.Thread(target=kill_an_explorer, args=(folder, process, killed), daemon=True).start()
    try:
        status = process.wait(timeout=arguments.seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(timeout=STOP_SECONDS)
        raise SystemExit(f"{variant(arguments)} took longer than --seconds, {arguments.seconds:g}") from None
    if status:
        raise SystemExit(f"{variant(arguments)} ended with status {status}")
    if arguments.kill and not killed.is_set():
        raise SystemExit(f"{variant(arguments)} ended before an explorer was killed")


def kill_an_explorer(folder: Path, run: subprocess.Popen[bytes], killed: threading.Event) -> None:
    """While it explores in the second iteration."""
    while not any(span.iteration == 1 and span.stage == "explore" for span in spans(folder)):
        if run.poll() is not None:
            return
        time.sleep(0.2)
    time.sleep(KILLED_AFTER)
    alive = explorers_alive()
    print(f"killed: process {alive[0]}, one of {len(alive)} explorers", flush=True)
    os.kill(alive[0], signal.SIGKILL)
    killed.set()


def explorers_alive() -> list[int]:
    """Process ids of the explorers on this machine, which is given to one run."""
    ray_auth.settle(local=True)
    from ray.util.state import list_actors  # after the mode is set, which Ray reads once

    found = list_actors(
        address=ray_auth.clusters_here()[0],
        filters=[("class_name", "=", "Explorer"), ("state", "=", "ALIVE")],
        timeout=STATE_SECONDS,
    )
    return [int(actor["pid"]) for actor in found]


def spans(folder: Path) -> Iterator[Span]:
    file = folder / "spans.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.endswith("}"):
            yield Span(**json.loads(line))


def collect(arguments: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    folder = arguments.work / "runs" / variant(arguments)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    iterations = [record for record in records if record["event"] == "iteration"]
    counted = iterations[-1 - arguments.staleness]
    during = [span for span in spans(folder) if span.iteration == counted["iteration"] and span.stage != "report"]
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


def planned(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of such an iteration by `solrl plan --gpu`, with the card's price list; empty on a CPU."""
    if not arguments.gpus or arguments.layers:
        return {}
    config = stored(arguments)
    return forecasted(config, model_facts(config), "h100-80" if memory() < SMALLER else "h200", arguments.gpus)


def forecasted(config: Config, facts: ModelFacts, card: str, count: int) -> dict[str, Any]:
    """What `solrl plan` says of an iteration on `count` of these cards."""
    prices, cluster = price_list(card), Cluster(gpu=card, gpus_per_node=count)
    assert prices.card is not None
    arithmetic = fitting.check(describe(fitting.settled(config, facts, prices.card), facts), prices.card)
    made = forecast(arithmetic, prices, cluster, orchestration(), advise=False)
    peaks = [round(card.peak / 1e9, 1) for card in cards(arithmetic)]
    offload = bool(arithmetic.config.fleet.offload)
    return {"prices": card, "seconds": made.seconds, "parts": made.parts, "offload": offload, "peak_gb": peaks}


def plan(arguments: argparse.Namespace) -> None:
    """Forecasts of the published iteration, of the published checkpoint's shapes, on hosts of several sizes."""
    for count in HOSTS:
        arguments.gpus = count
        given = [text for text in settings(arguments) if not text.startswith("model.path")]
        config = compiled_learner.settled(load(files(arguments), given))
        shapes = shipped(config.model)
        assert shapes is not None
        facts = facts_of(config, Sources(), shapes, pool_sampling(config).tier)
        made = forecasted(config, facts, arguments.plan, count)
        row = {"model": arguments.model, "gpus": count, "prompts": arguments.prompts, "placement": arguments.placement}
        add(row | made, arguments.out / "many_gpus_planned.json", of=(*row, "prices"))
        print(f"{arguments.model} on {count} {arguments.plan}: {made['seconds']:.1f} s", flush=True)


def stored(arguments: argparse.Namespace) -> Config:
    """What the run has written down, with what the cards decided."""
    return compiled_learner.settled(load([arguments.work / "runs" / variant(arguments) / "config.yaml"]))


def all_reduce(ranks: int, numbers: int) -> float:
    """Median seconds of a sum of `numbers` float32 over `ranks` GPUs."""
    seconds = torch.zeros(REDUCTIONS, dtype=torch.float64).share_memory_()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = spawn(_reduce, (ranks, numbers, seconds), nprocs=ranks, join=False)
    deadline = time.monotonic() + STOP_SECONDS
    while not processes.join(timeout=1.0):  # which is also false when the first of them has ended
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            raise SystemExit(f"the ranks did not meet for an all-reduce within {STOP_SECONDS:g} s")
    return statistics.median(seconds.tolist())


def _reduce(rank: int, ranks: int, numbers: int, seconds: torch.Tensor) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    gradient = torch.ones(numbers, device="cuda")
    for at in range(-3, REDUCTIONS):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(gradient)
        torch.cuda.synchronize()
        if rank == 0 and at >= 0:
            seconds[at] = time.perf_counter() - began
    dist.destroy_process_group()


def add(row: dict[str, Any], file: Path, of: Sequence[str]) -> None:
    """Add a row, in place of the one that has the same `of`."""
    rows = json.loads(file.read_text()) if file.exists() else []
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = [each for each in rows if any(each[key] != row[key] for key in of)]
    file.write_text(json.dumps([*kept, row], indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*MODELS, "testbed"])
    parser.add_argument("--gpus", type=int, help="of this host")
    parser.add_argument("--plan", metavar="CARD", help="forecast 48 prompts on such cards, and run nothing")
    parser.add_argument("--placement", choices=("colocated", "split"), default="colocated")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0)
    parser.add_argument("--zero", type=int, choices=(1, 2), default=1)
    parser.add_argument("--prompts", type=int, help="default: 12, of a plan 48")
    parser.add_argument("--iterations", type=int, help="default: 2, with staleness 4")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of the run, its start included")
    parser.add_argument("--kill", action="store_true", help="an explorer, in the second iteration")
    parser.add_argument("--layers", type=int, help="transformer blocks of each kind")
    parser.add_argument("--set", action="append", default=[], help="as for solrl train")
    parser.add_argument("--work", type=Path, default=Path("full_size"), help="checkpoints and run folders")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args(argv)
    arguments.iterations = arguments.iterations or (4 if arguments.staleness else 2)
    arguments.prompts = arguments.prompts or (PUBLISHED_PROMPTS if arguments.plan else 12)
    arguments.work = arguments.work.absolute()
    if arguments.plan:
        if arguments.layers or arguments.kill or arguments.gpus:
            parser.error(
                "--plan is of all layers, without failures, on 1, 2, 4 and 8 GPUs: leave out --layers, --kill, --gpus"
            )
        return plan(arguments)
    if arguments.gpus is None:
        parser.error("--gpus is missing: how many of this host's GPUs")
    if arguments.model != "testbed":
        make(arguments.model, arguments.work, arguments.layers)
    watch = Watch()
    watch.start()
    began = time.perf_counter()
    try:
        train(arguments)
    finally:
        watch.stop()
    row = {"variant": variant(arguments)} | {
        key: getattr(arguments, key)
        for key in ("model", "gpus", "placement", "staleness", "zero", "prompts", "layers", "kill", "set")
    }
    row |= {"device": torch.cuda.get_device_name() if gpus() else "CPU", "torch": torch.__version__}
    row |= {"wall": round(time.perf_counter() - began, 1)} | collect(arguments, watch)
    row["planned"] = planned(arguments)
    config = stored(arguments)
    row["activation_memory"] = config.learner.activation_memory
    if config.learner.world_size > 1 and gpus():
        row["all_reduce"] = all_reduce(config.learner.world_size, model_facts(config).lora_parameters)
    add(row, arguments.out / "many_gpus.json", of=("variant", "set"))
    stages = "  ".join(f"{stage} {row['seconds'][stage]:.1f}" for stage in STAGES)
    print(
        f"{row['variant']}: {stages}; planned {row['planned'].get('seconds', 0.0):.1f}; busy {row['busy']}", flush=True
    )


if __name__ == "__main__":
    main()
