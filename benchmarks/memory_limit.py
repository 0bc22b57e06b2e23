"""Does a whole iteration fit a smaller card? One run of the whole loop on a GPU whose memory is limited for real.

    python benchmarks/memory_limit.py flux 76 [--unlimited | --only-unlimited] [--prompts 1] [--out FOLDER]

This process takes all memory of the GPU but the limit, in GB, and keeps it. Then a run trains as in `many_gpus.py`,
with the part of configs/clusters for a card of that size and with what the plan says makes it fit such a card
(`changes`); all previews are finished. With `--unlimited` a run with the part for a large card follows, without a
limit; `--only-unlimited` adds one to what the file of this limit has. The first iteration contains the compilation of
every block, so the last one counts.

Prints peaks and seconds; writes memory_limit_MODEL_LIMIT.json into FOLDER (default benchmarks/results) with `model`,
`limit_gb`, `peak_gb`, `estimated_peak_gb`, `seconds`, `seconds_unlimited`, or `fits: false` with the reason. Seconds of
a published iteration of 48 prompts are computed: what rollout and update took for each prompt, and the rest once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import many_gpus
import torch
from common import MODELS, make, options, parsed, write
from torch import Tensor

from solrl_ray.config import compiled_learner
from solrl_ray.config.loading import load
from solrl_ray.errors import UserError
from solrl_ray.plan import fitting
from solrl_ray.plan.arithmetic import describe
from solrl_ray.plan.fitting import Gpu
from solrl_ray.plan.gpu_memory import gpu_memories
from solrl_ray.plan.model_facts import model_facts

PARTS = ((60.0, "one_gpu_80gb"), (40.0, "one_gpu_48gb"), (0.0, "one_gpu_24gb"))
"""GB that the limit must have → the part of configs/clusters; the first one counts."""


def run(arguments: argparse.Namespace, part: str, changes: Sequence[str]) -> argparse.Namespace:
    """The arguments of `many_gpus.py` for one run."""
    one_card = {"gpus": 1, "placement": "colocated", "staleness": 0}
    given = ["rollout.preview.prune=null", *arguments.set, *changes]
    return argparse.Namespace(**vars(arguments) | one_card | {"part": part, "set": given})


def part(limit: float) -> str:
    return next(name for least, name in PARTS if limit >= least)


def fitted(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the plan says of such a card: the settings that make the run fit, and its estimated peak in GB.

    Raises UserError if the run cannot fit.
    """
    card = Gpu(name=f"card of {arguments.limit:g} GB", memory=arguments.limit * 1e9)
    given = run(arguments, part(arguments.limit), [])
    files, settings = many_gpus.files(given), many_gpus.settings(given)
    config = compiled_learner.resolve_auto(load(files, settings))
    facts = model_facts(config)
    arithmetic = describe(fitting.with_activation_memory(config, facts, card), facts)
    changes: dict[str, Any] = {"learner.activation_memory": compiled_learner.activation_memory(arithmetic.config)}
    changes["learner.micro_batch"] = arithmetic.config.learner.micro_batch
    if fitting.fitted(arithmetic, card) is None:
        changes |= fitting.fitting_changes(arithmetic, card) or {}
        config = load(files, [*settings, *(f"{key}={json.dumps(value)}" for key, value in changes.items())])
        arithmetic = describe(compiled_learner.resolve_auto(config), facts)
    arithmetic = fitting.check(arithmetic, card)
    changes["fleet.offload"] = bool(arithmetic.config.fleet.offload)
    return {"changes": changes, "estimated_peak_gb": max(one.peak for one in gpu_memories(arithmetic)) / 1e9}


def ballast(limit: float) -> Tensor:
    """All of the GPU's free memory but `limit` GB."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(int(free - limit * 1e9), dtype=torch.uint8, device="cuda")


def measured(arguments: argparse.Namespace, changes: Sequence[str], limit: float | None) -> dict[str, Any]:
    """Seconds of the last iteration and the peak without what this process holds."""
    torch.cuda.empty_cache()
    taken = [ballast(limit)] if limit else []
    free, total = torch.cuda.mem_get_info()
    found = many_gpus.train(run(arguments, part(limit) if limit else "one_gpu", changes))
    taken.clear()
    name = "" if limit else "_unlimited"
    return {
        f"peak_gb{name}": max(found["peak_gb"]) - (total - free) / 1e9,
        f"seconds{name}": found["seconds"],
        f"seconds{name}_48_prompts": found["seconds_48_prompts"],
        f"first_iteration{name}": found["first_iteration"],
    }


def limited(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a run within the limit took, or why it does not fit."""
    found: dict[str, Any] = {"model": arguments.model, "limit_gb": arguments.limit, "prompts": arguments.prompts}
    found |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    try:
        found |= fitted(arguments)
        changes = [f"{key}={json.dumps(value)}" for key, value in found["changes"].items()]
        print(f"{' '.join(changes)}; estimated peak {found['estimated_peak_gb']:.1f} GB", flush=True)
        return found | measured(arguments, changes, arguments.limit) | {"fits": True}
    except (UserError, SystemExit) as error:
        return found | {"fits": False, "reason": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("limit", type=float, help="GB of the GPU that the run may use")
    parser.add_argument("--unlimited", action="store_true", help="then a run without the limit")
    parser.add_argument("--only-unlimited", action="store_true", help="that run alone")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of each run, its start included")
    options(parser)
    arguments = parsed(parser)
    make(arguments.model, arguments.work, arguments.layers)
    file = arguments.out / f"memory_limit_{arguments.model}_{arguments.limit:g}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if arguments.only_unlimited else limited(arguments)
    write(file, found)  # now, so that a command that is cut short keeps it
    if arguments.unlimited or arguments.only_unlimited:
        found |= measured(arguments, [], None)
        write(file, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
