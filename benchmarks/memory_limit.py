"""Does a whole iteration fit a smaller card? One run of the whole loop on a GPU whose memory is limited for real.

    python benchmarks/memory_limit.py flux 76 [--unlimited] [--prompts 1] [--out FOLDER] [--work FOLDER]

This process takes all memory of the GPU but the limit, in GB, and keeps it. Then a run trains through the command line
as in `full_iteration.py`, with the part of configs/clusters for a card of that size and with what the plan says makes
it fit such a card (`changes`). With `--unlimited` a run with the part for a large card follows, without a limit.
Per prompt everything has the published shape; an iteration has fewer prompts than the published 48. The weights are
random. The first iteration contains the compilation of every block, so the last one counts.

Prints peaks and seconds; writes memory_limit_MODEL_LIMIT.json into FOLDER (default benchmarks/results) with `model`,
`limit_gb`, `peak_gb`, `estimated_peak_gb`, `seconds`, `seconds_unlimited`, or `fits: false` with the reason. Seconds of
a published iteration of 48 prompts are computed (`published`): what rollout and update took for each prompt, and what
the rest took once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from full_iteration import CONFIGS, HERE, MODELS, STAGES, collect, make, settings, train
from torch import Tensor

from solrl_ray.cli.preflight import model_facts
from solrl_ray.config import compiled_learner, fitting
from solrl_ray.config.arithmetic import describe
from solrl_ray.config.card_memory import cards
from solrl_ray.config.fitting import Card
from solrl_ray.config.loading import load
from solrl_ray.errors import UserError

PARTS = ((60.0, "one_gpu_80gb"), (40.0, "one_gpu_48gb"), (0.0, "one_gpu_24gb"))
"""GB that the limit must have → the part of configs/clusters; the first one counts."""


PUBLISHED_PROMPTS = 48


def part(limit: float) -> Path:
    return CONFIGS / "clusters" / f"{next(name for least, name in PARTS if limit >= least)}.yaml"


def fitted(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the plan says of such a card: the settings that make the run fit, and its estimated peak in GB.

    Raises UserError if the run cannot fit.
    """
    card = Card(name=f"card of {arguments.limit:g} GB", memory=arguments.limit * 1e9)
    files = [CONFIGS / "methods/sol_rl.yaml", CONFIGS / "models" / MODELS[arguments.model], part(arguments.limit)]
    config = compiled_learner.settled(load(files, settings(arguments)))
    facts = model_facts(config)
    arithmetic = describe(fitting.with_activation_memory(config, facts, card), facts)
    changes: dict[str, Any] = {"learner.activation_memory": compiled_learner.activation_memory(arithmetic.config)}
    changes["learner.micro_batch"] = arithmetic.config.learner.micro_batch
    if fitting.fitted(arithmetic, card) is None:
        changes |= fitting.fitting_changes(arithmetic, card) or {}
        config = load(files, [*settings(arguments), *(f"{key}={json.dumps(value)}" for key, value in changes.items())])
        arithmetic = describe(compiled_learner.settled(config), facts)
    arithmetic = fitting.check(arithmetic, card)
    changes["fleet.offload"] = bool(arithmetic.config.fleet.offload)
    return {"changes": changes, "estimated_peak_gb": max(one.peak for one in cards(arithmetic)) / 1e9}


def ballast(limit: float) -> Tensor:
    """All of the GPU's free memory but `limit` GB."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(int(free - limit * 1e9), dtype=torch.uint8, device="cuda")


def one_run(arguments: argparse.Namespace, name: str, limit: float | None, changes: Sequence[str]) -> dict[str, Any]:
    cluster = part(limit) if limit else CONFIGS / "clusters/one_gpu.yaml"
    torch.cuda.empty_cache()
    taken = [ballast(limit)] if limit else []
    free, total = torch.cuda.mem_get_info()
    before = (total - free) / 1e9
    run = argparse.Namespace(**vars(arguments))
    run.name, run.set, run.parts = name, [*arguments.set, *changes], [cluster]
    result = collect(run, train(run) - before)
    taken.clear()
    result["seconds"] = seconds(result, arguments.work / "runs" / name)
    result["published"] = published(result["seconds"], arguments.prompts)
    return result


def seconds(result: dict[str, Any], run: Path) -> dict[str, float]:
    """Of the last iteration, by stage; `rollout` is exploring and regenerating, which overlap, and `update` the ranks'
    own work.
    """
    last = result["iterations"][-1]
    spans = [json.loads(line) for line in (run / "spans.jsonl").read_text().split("\n") if line]
    rollouts = [span["seconds"] for span in spans if (span["kind"], span["stage"]) == ("stage", "rollout")]
    return dict(last["seconds"]) | {"rollout": rollouts[-1], "update": last["busy_seconds"]["learn"]}


def published(stages: dict[str, float], prompts: int) -> float:
    """Seconds of an iteration of 48 prompts, from those of one with `prompts`."""
    of_prompts = stages["rollout"] + stages["update"]
    return stages["total"] + (PUBLISHED_PROMPTS / prompts - 1) * of_prompts


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"model": arguments.model, "limit_gb": arguments.limit, "prompts": arguments.prompts}
    found |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    name = f"{arguments.model}_{arguments.limit:g}gb"
    try:
        found |= fitted(arguments)
        changes = [f"{key}={json.dumps(value)}" for key, value in found["changes"].items()]
        print(f"{name}: {' '.join(changes)}; estimated peak {found['estimated_peak_gb']:.1f} GB", flush=True)
        limited = one_run(arguments, name, arguments.limit, changes)
    except (UserError, subprocess.CalledProcessError) as error:
        return found | {"fits": False, "reason": str(error)}
    found |= {"fits": True, "peak_gb": limited["peak_memory_gb"], "seconds": limited["seconds"]}
    found |= {"seconds_48_prompts": limited["published"]}
    return found | {"first_iteration": limited["iterations"][0]["seconds"]}


def save(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"memory_limit_{arguments.model}_{arguments.limit:g}.json"
    file.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("limit", type=float, help="GB of the GPU that the run may use")
    parser.add_argument("--unlimited", action="store_true", help="then a run without the limit")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--tier", default="fp8")
    parser.add_argument("--layers", type=int, help="transformer blocks of each kind, for a try")
    parser.add_argument("--set", action="append", default=[], help="as for solrl train, for both runs")
    parser.add_argument("--work", type=Path, default=Path("full_size"), help="checkpoints and run folders")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    arguments.name, arguments.work = arguments.model, arguments.work.absolute()
    make(arguments.model, arguments.work, arguments.layers)
    found = measured(arguments)
    save(found, arguments)  # now, so that a command that is cut short keeps it
    if arguments.unlimited:
        unlimited = one_run(arguments, f"{arguments.model}_unlimited", None, [])
        found |= {"seconds_unlimited": unlimited["seconds"], "peak_gb_unlimited": unlimited["peak_memory_gb"]}
        found |= {"seconds_unlimited_48_prompts": unlimited["published"]}
        save(found, arguments)
    print(f"{arguments.model} in {arguments.limit:g} GB: " + (found.get("reason") or f"peak {found['peak_gb']:.1f} GB"))
    for key in ("seconds", "seconds_unlimited"):
        if key in found:
            stages = "  ".join(f"{stage} {found[key].get(stage, 0.0):.1f}" for stage in STAGES)
            print(f"{key:<18}{stages}; 48 prompts {found[f'{key}_48_prompts']:.0f}")


if __name__ == "__main__":
    main()
