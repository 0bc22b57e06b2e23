"""What do a learner's passes cost, compiled and not? One published architecture with random weights, on one GPU.

    python benchmarks/learner.py MODEL [--memory 1 0.5 0] [--out FOLDER]

Measures milliseconds per sample and timestep: a pass of the base (adapters off) and one of `old`, both without
gradient, and forward plus backward of `default`. Their sum is the cost of DiffusionNFT. LoRA, micro-batch and
resolution are those of configs/models. Variants:

    eager      an uncompiled learner: flash attention, and the default `learner.activation_memory` without compiling
    compiled   each `--memory`, with the family's attention; if that is cuDNN's, once more with flash attention, which
               shows the cost of `run.deterministic` in attention alone

`--deterministic` sets `run.deterministic` for all variants: compare with a call without it for the total cost. Two
calls that print the same digests computed the same gradients.

All variants run one after the other in this process, each on a copy of the same weights. Times are medians of CUDA
events after warm-ups. First calls, which compile, are listed separately in seconds (a few seconds with a filled compile
cache). `gradient_cosine` compares a gradient with the eager one.

Prints rows; writes learner_MODEL.json into FOLDER (default benchmarks/results).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import CONFIGS, MODELS, SOL_RL, options, parsed
from common import write as write_json
from full_size import random_embeddings, transformer_only
from torch import Tensor

from actors.workers.devices import use_deterministic_kernels
from solrl_ray import models
from solrl_ray.config import compiled_learner
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.learning.policy_passes import PolicyPasses
from solrl_ray.models import attention
from solrl_ray.models.base import DiffusionModel
from solrl_ray.policy import adapters
from solrl_ray.quantization.attestation import device_name
from solrl_ray.weight_sync.checksums import tensors_digest

KINDS = ("base", "old", "default")


def settled(arguments: argparse.Namespace, **settings: Any) -> Config:
    """The shipped configuration of a model with `settings`; prompts and checkpoint are placeholders."""
    overrides = [
        "prompts={train: unused, heldout: unused}",
        "rewards=[{kind: clipscore}]",
        f"fleet.learners.num_gpus={1 if arguments.device == 'cuda' else 0}",
        f"run.deterministic={str(arguments.deterministic).lower()}",
        *(f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()),
        *([f"learner.micro_batch={arguments.batch}"] if arguments.batch else []),
    ]
    files = [SOL_RL, CONFIGS / "models" / MODELS[arguments.model]]
    return compiled_learner.resolve_auto(load(files, [*overrides, *arguments.set]))


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class Side:
    """One variant of a learner's passes: a model, its factors and a micro-batch."""

    def __init__(self, config: Config, arguments: argparse.Namespace) -> None:
        self.config, self._arguments = config, arguments
        self.model: DiffusionModel = transformer_only(arguments.model, config.model, arguments.device, arguments.layers)
        self.passes = PolicyPasses(config, self.model)
        self.attention = attention.kernels()
        self._factors = adapters.parameters(self.model.transformer, "default")
        self._fill("default", 2)
        self._fill("old", 3)
        samples, generator = config.learner.micro_batch, torch.Generator().manual_seed(4)
        self._batch = self.model.batch_embeddings(random_embeddings(config.model, samples))
        self._x_t = torch.randn(samples, *self.model.latent_shape, generator=generator).to(arguments.device)
        self._t = torch.linspace(0.1, 0.9, samples).to(arguments.device)

    def _fill(self, policy: Any, seed: int) -> None:
        """Fill a policy with non-zero factors, so that both A and B have a gradient."""
        generator = torch.Generator().manual_seed(seed)
        factors = adapters.parameters(self.model.transformer, policy)
        new = {name: torch.randn(f.shape, generator=generator) * 0.01 for name, f in factors.items()}
        adapters.load_factors(self.model.transformer, policy, {n: f.to(self._arguments.device) for n, f in new.items()})

    def run(self, kind: Any) -> None:
        """One pass as in the learner: forward, for `default` also backward."""
        if kind != "default":
            with torch.no_grad():
                self._velocity()
            return
        self._velocity().square().mean().backward()

    def gradient(self) -> Tensor:
        adapters.use(self.model.transformer, "default")
        for factor in self._factors.values():
            factor.grad = None
        self.run("default")
        # An unused factor's gradient is None, or zeros if blocks are compiled.
        grads = [torch.zeros_like(f) if f.grad is None else f.grad for f in self._factors.values()]
        return torch.cat([grad.flatten() for grad in grads]).cpu()

    def _velocity(self) -> Tensor:
        return self.passes.velocity(self._x_t, self._t, self._batch)


def measure(side: Side, arguments: argparse.Namespace, reference: Tensor | None) -> tuple[dict[str, Any], Tensor]:
    """Times and memory of a variant, and its gradient."""
    samples, cuda, device = side.config.learner.micro_batch, arguments.device == "cuda", torch.device(arguments.device)
    resident = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first, medians, spreads = {}, {}, {}
    for kind in KINDS:
        adapters.use(side.model.transformer, kind)  # type: ignore[arg-type]
        first[kind] = round(milliseconds(partial(side.run, kind), device) / 1e3, 1)
        times = [
            milliseconds(partial(side.run, kind), device) / samples
            for _ in range(arguments.warm_ups + arguments.repeats)
        ][arguments.warm_ups :]
        medians[kind] = round(statistics.median(times), 2)
        spreads[kind] = round((max(times) - min(times)) / statistics.median(times), 4)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    gradient = side.gradient()
    cosine = None
    if reference is not None:
        cosine = torch.nn.functional.cosine_similarity(gradient.double(), reference.double(), dim=0).item()
    result = {
        "compiled": side.passes.compiled or "no",
        "attention": side.attention,
        "activation_memory": side.config.learner.activation_memory,
        "milliseconds": {**medians, "sum": round(sum(medians.values()), 2)},
        "spread": spreads,
        "first_call_seconds": first,
        "peak_gb": round(peak / 1e9, 1),
        "resident_gb": round(resident / 1e9, 1),
        "gradient_cosine": cosine,
        "gradient_digest": tensors_digest({"gradient": gradient}),
    }
    return result, gradient


def sides(arguments: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Name and settings of each variant."""
    eager: list[tuple[str, dict[str, Any]]] = [("eager", {"compile__learner": False})]
    compiled = [
        (f"compiled, activation memory {memory:g}", {"compile__learner": True, "learner__activation_memory": memory})
        for memory in arguments.memory
    ]
    if models.family(settled(arguments).model).TRAINS_ON_CUDNN and not arguments.deterministic:
        name, settings = compiled[0]
        # Here run.deterministic only selects the attention kernel.
        compiled.append((f"{name}, flash attention", settings | {"run__deterministic": True}))
    return eager + compiled


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    reference: Tensor | None = None
    for name, settings in sides(arguments):
        torch._dynamo.reset()
        side = Side(settled(arguments, **settings), arguments)
        result, gradient = measure(side, arguments, reference)
        reference = gradient if reference is None else reference
        eager = results[0]["milliseconds"]["sum"] if results else result["milliseconds"]["sum"]
        results.append({"side": name, "ratio_to_eager": round(eager / result["milliseconds"]["sum"], 3), **result})
        print(json.dumps(results[-1]), flush=True)
        del side
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        write(results, arguments)  # after each variant, so that an interrupted call keeps its results
    return results


def write(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    shipped = settled(arguments).learner.activation_memory
    wanted = None if shipped is None else f"compiled, activation memory {shipped:g}"  # None: by GPU memory
    ratio = next((one["ratio_to_eager"] for one in results if one["side"] == wanted), None)
    content = {
        "question": "cost of a learner's passes, compiled, over the shipped eager settings",
        "statistic": f"median of {arguments.repeats} after {arguments.warm_ups} warm-ups, ms per sample and timestep",
        "model": Path(MODELS[arguments.model]).stem,
        "micro_batch": settled(arguments).learner.micro_batch,
        "device": device_name(torch.device(arguments.device)),
        "torch": torch.__version__,
        "layers": arguments.layers or "all",
        "deterministic": arguments.deterministic,
        "shipped": wanted,
        "ratio_to_eager": ratio,
        "sides": results,
    }
    name = arguments.model + "_deterministic" * arguments.deterministic
    write_json(arguments.out / f"learner_{name}.json", content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--memory", nargs="+", type=float, default=[1.0, 0.5, 0.0], help="of the compiled variants")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--batch", type=int, help="micro-batch instead of the configuration's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options(parser)
    arguments = parsed(parser)
    if arguments.deterministic:  # before CUDA is used
        use_deterministic_kernels()
    measured(arguments)


if __name__ == "__main__":
    main()
