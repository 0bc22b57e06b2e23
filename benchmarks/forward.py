"""What does a forward cost in each tier? Published architectures with random weights, on one GPU.

    python benchmarks/forward.py [--models flux z_image] [--tiers fp8] [--batches 24] [--deterministic] [--out FOLDER]

Every ratio has both sides in this run, measured in turn: the transformer compiled block by block in bfloat16, and one
of the same weights quantised to the tier and compiled alike (`nvfp4-emulated` is never compiled). All linears of the
blocks are quantised, but for modulation. Times are medians of CUDA events after warm-ups; the first call, which
compiles, is shown apart. Weights are random: times mean something, errors are those of such weights.

`--deterministic` has the kernels of `run.deterministic`: beside a call without it, what they cost. Two calls that print
the same digest computed the same bits.

Prints rows; writes forward.json into FOLDER (default benchmarks/results).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import CONFIGS, MODELS, milliseconds, options, parsed, spread, write
from full_size import random_embeddings, transformer_only
from torch import Tensor

from actors.workers.devices import use_deterministic_kernels
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.models.compilation import compile_
from solrl_ray.quantization.attestation import device_name
from solrl_ray.quantization.scope import quantize_
from solrl_ray.weight_sync.checksums import tensors_digest

BATCHES = {"flux": (8, 24), "sd3": (12,), "sana": (24,), "qwen_image": (8, 24), "z_image": (8, 24)}
ALL_BLOCKS = ("flux", "sd3", "sana")
"""With configs/scopes/all_blocks.yaml; the scopes of the others' own parts are as wide."""
Row = dict[str, Any]


def configured(model: str, *settings: str, parts: Sequence[Path] = ()) -> Config:
    """The shipped configuration of a model, without prompts and checkpoint."""
    files = [CONFIGS / "methods/sol_rl.yaml", CONFIGS / "models" / MODELS[model], *parts]
    return load(files, ["prompts={train: unused, heldout: unused}", "rewards=[{kind: clipscore}]", *settings])


@torch.no_grad()
def measure(name: str, arguments: argparse.Namespace) -> list[Row]:
    device: torch.device = arguments.device
    scope = [CONFIGS / "scopes/all_blocks.yaml"] * (name in ALL_BLOCKS)
    config = configured(name, *arguments.set, parts=scope)
    models, layers = {}, {}
    for tier in ("bf16", *arguments.tiers):
        model = transformer_only(config.model, str(device), arguments.layers)  # of the same weights each time
        report = quantize_(model.transformer, tier, config.model.quantization, without_kernels=device.type == "cpu")
        compiled = compile_(model.transformer, config.compile, device, tier)
        print(f"{name} {tier}: {report.sentence()}\n  compiled: {compiled}", flush=True)
        models[tier], layers[tier] = model, len(report.layers)
    found = []
    for batch in arguments.batches or BATCHES[name]:
        embeddings = random_embeddings(config.model, batch, words=config.model.max_sequence_length)
        prompts = models["bf16"].batch_embeddings(embeddings)
        generator = torch.Generator().manual_seed(1)
        latents = torch.randn(batch, *models["bf16"].latent_shape, generator=generator).to(device)
        runs: dict[str, Callable[[], Tensor]] = {
            tier: partial(model.velocity, latents, 0.5, prompts) for tier, model in models.items()
        }
        for row in of_batch(batch, runs, arguments):
            found.append({"model": name, "layers": layers[row["tier"]], **row})
            print("  ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
    return found


def of_batch(batch: int, runs: dict[str, Callable[[], Tensor]], arguments: argparse.Namespace) -> list[Row]:
    """Milliseconds per image and step; `speed`: times compiled bfloat16; `error`: relative to its output, Frobenius."""
    device: torch.device = arguments.device
    first = {tier: milliseconds(run, device) / 1e3 for tier, run in runs.items()}
    times: dict[str, list[float]] = {tier: [] for tier in runs}
    for repetition in range(arguments.warm_ups + arguments.repeats):
        for tier, run in runs.items():
            elapsed = milliseconds(run, device)
            if repetition >= arguments.warm_ups:
                times[tier].append(elapsed / batch)
    wanted, median = runs["bf16"](), {tier: statistics.median(of) for tier, of in times.items()}
    rows = []
    for tier, run in runs.items():
        output = run()
        row: Row = {"tier": tier, "batch": batch, "milliseconds": round(median[tier], 3), "spread": spread(times[tier])}
        row |= {"first_call_seconds": round(first[tier], 1), "speed": round(median["bf16"] / median[tier], 3)}
        row |= {"error": round(float((output - wanted).norm() / wanted.norm()), 4)}
        rows.append(row | {"digest": tensors_digest({"output": output})})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--tiers", nargs="+", default=["fp8"])
    parser.add_argument("--batches", nargs="+", type=int, help="default: those of the published figures")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm-ups", type=int, default=3)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    options(parser)
    arguments = parsed(parser)
    if arguments.deterministic:
        use_deterministic_kernels()
    results: list[Row] = []
    for name in arguments.models:
        results += measure(name, arguments)
        torch._dynamo.reset()
        if arguments.device.type == "cuda":
            torch.cuda.empty_cache()
        content = {
            "question": "cost of a transformer's forward in each tier, over compiled bfloat16",
            "statistic": f"median of {arguments.repeats} after {arguments.warm_ups} warm-ups, tiers in turn",
            "device": device_name(arguments.device),
            "torch": torch.__version__,
            "settings": arguments.set,
            "deterministic": arguments.deterministic,
            "layers": arguments.layers or "all",
            "results": results,
        }
        # After each model: a run cut short keeps what it has.
        write(arguments.out / f"forward{'_deterministic' * arguments.deterministic}.json", content)


if __name__ == "__main__":
    main()
