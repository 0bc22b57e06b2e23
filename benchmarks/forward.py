"""What does a forward cost in each tier? Published architectures with random weights, on one GPU.

    python benchmarks/forward.py [--models flux z_image] [--tiers fp8] [--batches 24] [--cudagraphs] [--out FOLDER]

Every ratio has both sides in this run, measured in turn: the transformer compiled block by block in bfloat16, and a
copy of it quantised to the tier and compiled alike (`nvfp4-emulated` is never compiled). Times are medians of CUDA
events after warm-ups; the first call, which compiles, is shown apart. The share of FLOPs is counted in one forward.
Weights are random: times mean something, errors are those of such weights. Aims on one H200: fp8 at least 1.55 times
compiled bfloat16 on FLUX.1-dev at 512 px, 1.4 on SD3.5-Large, 1.25 on SANA at 1024 px.

Prints a table; writes forward.json into FOLDER (default benchmarks/results).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from architectures import FLUX, QWEN_IMAGE, SANA, SD3, Z_IMAGE
from full_size import random_model
from torch import Tensor, nn

from solrl_ray.config.schema import Compile, QuantizationScope
from solrl_ray.models import FAMILIES
from solrl_ray.models.compilation import GraphedForward, compile_
from solrl_ray.quantization.attestation import device_name
from solrl_ray.quantization.scope import QuantizationReport, quantize_

RESULTS = Path(__file__).parent / "results"
EMBEDDERS = ["x_embedder", "context_embedder", "time_text_embed", "time_embed", "caption_projection", "pos_embed"]
AIMS = {"flux": 1.55, "sd3": 1.4, "sana": 1.25}
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    title: str
    kind: type[nn.Module]
    settings: dict[str, Any]
    batches: tuple[int, ...]
    inputs: Callable[[int, Callable[..., Tensor]], dict[str, Any]]
    """Batch size, a maker of random tensors → keyword arguments of a forward."""
    skip: list[str]
    """All linears of the blocks without adaLN are quantised."""


def flux_inputs(batch: int, randn: Callable[..., Tensor]) -> dict[str, Tensor]:
    side = 32
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
    one = randn(1)
    return {
        "hidden_states": randn(batch, side**2, 64),
        "encoder_hidden_states": randn(batch, 128, 4096),
        "pooled_projections": randn(batch, 768),
        "timestep": torch.full_like(one, 0.5).expand(batch).contiguous(),
        "guidance": torch.ones_like(one, dtype=torch.float32).expand(batch).contiguous(),
        "img_ids": ids.to(one.device, torch.float32),
        "txt_ids": torch.zeros(128, 3, device=one.device),
    }


def sd3_inputs(batch: int, randn: Callable[..., Tensor]) -> dict[str, Tensor]:
    return {
        "hidden_states": randn(batch, 16, 128, 128),
        "encoder_hidden_states": randn(batch, 205, 4096),
        "pooled_projections": randn(batch, 2048),
        "timestep": torch.full_like(randn(1), 500.0).expand(batch).contiguous(),
    }


def sana_inputs(batch: int, randn: Callable[..., Tensor]) -> dict[str, Tensor]:
    return {
        "hidden_states": randn(batch, 32, 32, 32),
        "encoder_hidden_states": randn(batch, 300, 2304),
        "encoder_attention_mask": torch.ones_like(randn(batch, 300)),
        "timestep": torch.full_like(randn(1), 500.0).expand(batch).contiguous(),
    }


def masked_text(batch: int, tokens: int, width: int, randn: Callable[..., Tensor]) -> dict[str, Tensor]:
    return {
        "encoder_hidden_states": randn(batch, tokens, width),
        "encoder_hidden_states_mask": torch.ones_like(randn(batch, tokens)),
        "timestep": torch.full_like(randn(1), 0.5).expand(batch).contiguous(),
    }


def qwen_image_inputs(batch: int, randn: Callable[..., Tensor]) -> dict[str, Any]:
    side = 32
    latents = {"hidden_states": randn(batch, side**2, 64), "img_shapes": (1, side, side)}
    return latents | masked_text(batch, 128, 3584, randn)


def z_image_inputs(batch: int, randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {"hidden_states": randn(batch, 16, 64, 64)} | masked_text(batch, 128, 2560, randn)


ARCHITECTURES = {
    "flux": Architecture(
        title="FLUX.1-dev, 512 px, 128 text tokens",
        kind=diffusers.FluxTransformer2DModel,
        settings=FLUX,
        batches=(8, 24),
        inputs=flux_inputs,
        skip=[*EMBEDDERS, "norm", "^proj_out"],
    ),
    "sd3": Architecture(
        title="SD3.5-Large, 1024 px, 205 text tokens",
        kind=diffusers.SD3Transformer2DModel,
        settings=SD3,
        batches=(12,),
        inputs=sd3_inputs,
        skip=[*EMBEDDERS, "norm", "^proj_out"],
    ),
    "sana": Architecture(
        title="SANA 1.6B, 1024 px, 300 text tokens",
        kind=diffusers.SanaTransformer2DModel,
        settings=SANA,
        batches=(24,),
        inputs=sana_inputs,
        skip=[*EMBEDDERS, "norm", "^proj_out"],
    ),
    "qwen_image": Architecture(
        title="Qwen-Image, 512 px, 128 text tokens",
        kind=diffusers.QwenImageTransformer2DModel,
        settings=QWEN_IMAGE,
        batches=(8, 24),
        inputs=qwen_image_inputs,
        skip=["img_in", "txt_in", "time_text_embed", "img_mod", "txt_mod", "norm", "^proj_out"],
    ),
    "z_image": Architecture(
        title="Z-Image, 512 px, 128 text tokens",
        kind=diffusers.ZImageTransformer2DModel,
        settings=Z_IMAGE,
        batches=(8, 24),
        inputs=z_image_inputs,
        skip=["x_embedder", "cap_embedder", "t_embedder", "adaLN_modulation", "final_layer", "context_refiner"],
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    model: str
    tier: str
    batch: int
    milliseconds: float
    """Per image and step: median."""
    spread: float
    """(slowest - fastest) / median of the repetitions."""
    first_call_seconds: float
    speed: float
    """Times compiled bfloat16 of the same run."""
    flops_share: float
    """Of all linears' FLOPs, in quantised layers."""
    error: float
    """Relative to the bfloat16 output, Frobenius."""
    layers: int
    peak_gb: float


def build(name: str, device: torch.device, layers: int | None) -> nn.Module:
    architecture = ARCHITECTURES[name]
    settings = dict(architecture.settings)
    if layers is not None:
        settings |= {key: layers for key in ("num_layers", "num_single_layers", "n_layers") if key in settings}
    model: nn.Module = random_model(lambda: architecture.kind(**settings), str(device))
    module, _, family = FAMILIES[name].partition(":")
    adapted: nn.Module = getattr(import_module(module), family).adapt_(model)
    return adapted


def linear_flops(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """Module path → FLOPs of each linear in one forward, in which every row costs 2 · in · out."""
    counted: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def count(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            rows = output.numel() // module.out_features
            counted[name] = counted.get(name, 0) + 2 * rows * module.in_features * module.out_features

        return count

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    run()
    for handle in handles:
        handle.remove()
    return counted


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


def first_call(run: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def sides(base: nn.Module, name: str, arguments: argparse.Namespace) -> dict[str, tuple[nn.Module, QuantizationReport]]:
    """Tier → its model: `base` itself in bfloat16, quantised copies for the rest; all compiled when first called."""
    device, settings = arguments.device, Compile(enabled=True, mode=arguments.mode)
    scope = QuantizationScope(skip=ARCHITECTURES[name].skip)
    made = {"bf16": (base, quantize_(base, "bf16", scope))}
    for tier in arguments.tiers:
        quantized = copy.deepcopy(base)
        made[tier] = (quantized, quantize_(quantized, tier, scope, without_kernels=device.type == "cpu"))
    for tier, (model, report) in made.items():
        print(f"{name} {tier}: {report.sentence()}\n  compiled: {compile_(model, settings, device, tier)}", flush=True)
    return made


@torch.no_grad()
def measure(name: str, arguments: argparse.Namespace) -> list[Measured]:
    device: torch.device = arguments.device
    base = build(name, device, arguments.layers)
    generator = torch.Generator(device).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=DTYPE)

    architecture = ARCHITECTURES[name]
    few = architecture.inputs(1, randn)
    flops = linear_flops(base, lambda: base(**few))
    made = sides(base, name, arguments)
    results: list[Measured] = []
    for batch in arguments.batches or architecture.batches:
        inputs = architecture.inputs(batch, randn)
        results += _measure_batch(name, batch, made, inputs, flops, arguments)
    return results


def first_part(model: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    return model(**inputs, return_dict=False)[0]


def _measure_batch(
    name: str,
    batch: int,
    made: dict[str, tuple[nn.Module, QuantizationReport]],
    inputs: dict[str, Any],
    flops: dict[str, int],
    arguments: argparse.Namespace,
) -> list[Measured]:
    device: torch.device = arguments.device
    runs: dict[str, Callable[[], Any]] = {}
    for tier, (model, _) in made.items():
        runs[tier] = partial(first_part, model, inputs)
        if arguments.cudagraphs and tier != "nvfp4-emulated":
            graphed = GraphedForward(model.forward)
            runs[f"{tier} + CUDA graph"] = partial(first_part, graphed, inputs)
    first = {tier: first_call(run, device) for tier, run in runs.items()}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: dict[str, list[float]] = {tier: [] for tier in runs}
    for repetition in range(arguments.warm_ups + arguments.repeats):
        for tier, run in runs.items():
            elapsed = milliseconds(run, device)
            if repetition >= arguments.warm_ups:
                times[tier].append(elapsed / batch)
    wanted = runs["bf16"]().float()
    results = []
    for tier, run in runs.items():
        report = made[tier.split(" ")[0]][1]
        median = statistics.median(times[tier])
        covered = sum(flops[layer] for layer in report.layers)
        results.append(
            Measured(
                model=name,
                tier=tier,
                batch=batch,
                milliseconds=round(median, 3),
                spread=round((max(times[tier]) - min(times[tier])) / median, 4),
                first_call_seconds=round(first[tier], 1),
                speed=round(statistics.median(times["bf16"]) / median, 3),
                flops_share=round(covered / sum(flops.values()), 4),
                error=round(float((run().float() - wanted).norm() / wanted.norm()), 4),
                layers=len(report.layers),
                peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 1) if device.type == "cuda" else 0.0,
            )
        )
        print(_row(results[-1]), flush=True)
    return results


def _row(result: Measured) -> str:
    return (
        f"{result.model:<5} batch {result.batch:>3}  {result.tier:<22} {result.milliseconds:9.3f} ms per image  "
        f"{result.speed:5.3f} x  error {result.error:.4f}  {result.layers:>3} layers, "
        f"{100 * result.flops_share:5.1f} % of linear FLOPs  first call {result.first_call_seconds:6.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--tiers", nargs="+", default=["fp8"])
    parser.add_argument("--batches", nargs="+", type=int, help="default: those of the published figures")
    parser.add_argument("--mode", default="default", choices=["default", "max-autotune-no-cudagraphs"])
    parser.add_argument("--cudagraphs", action="store_true", help="each tier also as a captured CUDA graph")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm-ups", type=int, default=3)
    parser.add_argument("--layers", type=int, help="cut the depth, for a try on a small machine")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results: list[Measured] = []
    for name in arguments.models:
        results += measure(name, arguments)
        torch._dynamo.reset()
        if arguments.device.type == "cuda":
            torch.cuda.empty_cache()
        write(results, arguments)  # after each model: a run cut short keeps what it has


def write(results: list[Measured], arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {
        "question": "cost of a transformer's forward in each tier, over compiled bfloat16",
        "statistic": f"median of {arguments.repeats} after {arguments.warm_ups} warm-ups, tiers in turn",
        "device": device_name(arguments.device),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "mode": arguments.mode,
        "layers": arguments.layers or "all",
        "titles": {name: ARCHITECTURES[name].title for name in arguments.models},
        "aims": {name: AIMS.get(name) for name in arguments.models},
        "results": [asdict(result) for result in results],
    }
    (arguments.out / "forward.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
