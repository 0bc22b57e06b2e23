"""What exploring ahead gains: seconds an iteration, by who shares a GPU with whom and by `rollout.max_staleness`.

    python benchmarks/overlap.py [--seconds 300] [--only split/1 …] [--prompts 2] [--layers N] [--work FOLDER]
        [--set objective.advantage.std=group --name overlap_std_group]

Needs two GPUs. FLUX.1-dev at its published size with random weights (`full_size.py`), 96 seeds a prompt, 24
kept, all previews finished:

    colocated      each GPU has one process, which explores, regenerates and learns
    split          explorer and regenerator share one GPU, the learner has the other one

Exploring ahead is refused where one process explores and learns: the table says so. Each variant is a run of its own
and is stopped after `--seconds`, or with its last iteration. The first two iterations do not count: they contain the
compilation, and the first one explores with its own revision. Nor does the last one, which explores nothing ahead.
`ahead` is exploring that overlapped with the iteration before, `explore` the rest of it. Prints a table; writes
overlap.json (or what `--name` says) into results/, where variants that were not run this time keep their rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from full_iteration import CONFIGS, HERE, make

SHARES: dict[str, dict[str, float]] = {
    "colocated": {"explorers": 1.0, "regenerators": 1.0, "learners": 1.0},
    "split": {"explorers": 0.5, "regenerators": 0.5, "learners": 1.0},
}
VARIANTS = tuple(f"{placement}/{staleness}" for placement in SHARES for staleness in (0, 1))
REFUSED = ("colocated/1",)
STEADY = 2
STAGES = ("ahead", "explore", "regenerate", "learn", "checkpoint", "publish", "total")


def settings(variant: str, arguments: argparse.Namespace) -> list[str]:
    """The configuration of a variant, as for ``--set``."""
    placement, staleness = variant.split("/")
    each = 2 if placement == "colocated" else 1
    shares = SHARES[placement]
    return [
        f"run={{name: '{variant.replace('/', '-staleness-')}', root: '{arguments.work / 'runs'}', "
        f"iterations: {arguments.iterations}}}",
        f"rollout.max_staleness={staleness}",
        f"rollout.prompts={arguments.prompts}",
        f"fleet.explorers={{count: {each}, num_gpus: {shares['explorers']}, threads: 4}}",
        f"fleet.regenerators={{count: {each}, num_gpus: {shares['regenerators']}, threads: 4}}",
        f"fleet.learners={{num_gpus: {shares['learners']}, threads: 4}}",
        f"fleet.placement={placement}",
        f"learner.world_size={each}",
        "evaluation={prompts: 1, samples: 1, steps: 2, pictures: 0}",
        f"model.path='{arguments.work / 'flux'}'",
        f"rewards=[{{kind: clipscore, path: '{arguments.work / 'clip'}'}}]",
        "prompts={train: builtin:testbed/prompts/train.txt, heldout: builtin:testbed/prompts/heldout.txt}",
        f"rollout.explore.precision={arguments.tier}",
        "rollout.preview.prune=null",
        "fleet.deadlines={start: 600, explore: 600, regenerate: 600}",
        *arguments.set,
    ]


def measure(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a variant until it ends or its time is over; its steady iterations."""
    parts = [CONFIGS / "methods/sol_rl.yaml", CONFIGS / "models/flux1_dev.yaml"]
    command: list[str | Path] = [sys.executable, "-m", "solrl_ray", "train", "--no-live", *parts]
    for setting in settings(variant, arguments):
        command += ["--set", setting]
    folder = arguments.work / "runs" / variant.replace("/", "-staleness-")
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    process = subprocess.Popen(command)
    try:
        status = process.wait(timeout=arguments.seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        status = 0
    if status:
        raise SystemExit(f"{variant} ended with status {status}")
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    steady = range(STEADY, arguments.iterations - 1)
    iterations = [r["seconds"] for r in records if r["event"] == "iteration" and r["iteration"] in steady]
    return {
        "variant": variant,
        "iterations": len(iterations),
        "wall": time.perf_counter() - began,
        "seconds": {
            stage: statistics.fmean(each.get(stage, 0.0) for each in iterations) for stage in STAGES if iterations
        },
        "totals": [each["total"] for each in iterations],
    }


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "model": "flux",
        "layers": arguments.layers or "published",
        "tier": arguments.tier,
        "prompts": arguments.prompts,
        "device": torch.cuda.get_device_name() if gpus else "CPU",
        "gpus": gpus,
        "torch": torch.__version__,
        "set": arguments.set,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["variant            n  " + "  ".join(f"{stage:>10}" for stage in STAGES)]
    for variant in VARIANTS:
        if variant in REFUSED:
            lines.append(f"{variant:17}  -  refused: one process of each GPU explores and learns")
        elif variant in rows and not rows[variant]["iterations"]:
            lines.append(f"{variant:17}  0  stopped before its iteration {STEADY} had ended; give it more --seconds")
        elif variant in rows:
            seconds = rows[variant]["seconds"]
            times = "  ".join(f"{seconds[stage]:10.2f}" for stage in STAGES)
            lines.append(f"{variant:17}  {rows[variant]['iterations']}  {times}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runnable = [variant for variant in VARIANTS if variant not in REFUSED]
    parser.add_argument("--only", nargs="+", choices=runnable, default=runnable, metavar="PLACEMENT/LEAD")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each variant, its start included")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tier", default="fp8")
    parser.add_argument("--layers", type=int, help="transformer blocks of each kind, for a shorter run")
    parser.add_argument("--set", action="append", default=[], help="as for solrl train")
    parser.add_argument("--name", default="overlap", help="of the result file")
    parser.add_argument("--work", type=Path, default=Path("full_size"), help="checkpoints and run folders")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    arguments.work = arguments.work.absolute()
    make("flux", arguments.work, arguments.layers)
    path = arguments.out / f"{arguments.name}.json"
    stated, rows = conditions(arguments), {}
    if path.exists() and (before := json.loads(path.read_text()))["conditions"] == stated:
        rows = {row["variant"]: row for row in before["rows"]}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for variant in arguments.only:
        rows[variant] = measure(variant, arguments)
        path.write_text(json.dumps({"conditions": stated, "rows": list(rows.values())}, indent=1) + "\n")
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
