"""What does a new policy revision weigh on the wire, and how long does it take to make and to swap in?

    python benchmarks/publish.py                                   # the testbed's shapes, seconds on a CPU
    python benchmarks/publish.py flux --layers 4                   # FLUX.1-dev's shapes, few of its 190 touched layers
    python benchmarks/publish.py flux --device cuda                # all of them: 1.79 B weights; under three minutes
    python benchmarks/publish.py flux --layers 24 --only-steps     # a few hundred MB; shares on a CPU, in minutes

Base weights are Gaussian, B A is random of the LoRA rank, and from one revision to the next the merged weights move by
a stated share of their norm. `delta` is the payload's packed part against the packed tensors themselves. Times are the
median over the repetitions, of everything that happens to one revision:

    merge, quantise, swap     factors into the base in FP64, packed once, written into live layers (aim on a GPU: 0.2 s)
    prove                     checksums of all live buffers, as for a receipt
    a snapshot, all of it     what an explorer does with a payload that is no delta

Then, through Ray, each step from the end of an update to the proof of an explorer, for revisions that travel as deltas
(`publish_steps.py`).

Prints a table; writes benchmarks/results/publish_<shape>_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from publish_steps import steps
from torch import nn

from solrl_ray.config.schema import Lora, Publish
from solrl_ray.quantization.capability import device_name
from solrl_ray.quantization.formats import frozen_amax, pack
from solrl_ray.quantization.layers import QuantizedLinear
from solrl_ray.quantization.planning import FORMAT_OF_TIER
from solrl_ray.quantization.scope import LAYERS
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.checksums import tensors_digest
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publications
from solrl_ray.weight_sync.publish import Publisher, merge_module
from solrl_ray.weight_sync.receive import Receiver

RESULTS = Path(__file__).parent / "results"
SHAPES = {"testbed": [(128, 128)] * 28, "flux": [(3072, 3072)] * 190}
"""[out, in] of the layers that the published LoRA targets touch: to_q, to_k, to_v, to_out.0."""
CHANGES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
DRIFT = 0.1
"""‖B A‖ / ‖W‖ of the revision before."""


class World:
    """One model's touched layers, its learner's publisher and an explorer's live layers."""

    def __init__(self, shape: str, layers: int | None, tier: str, rank: int, device: torch.device) -> None:
        self.device, self.lora = device, Lora(rank=rank, alpha=float(rank), targets=["to_q"])
        self.format = FORMAT_OF_TIER[tier]
        generator = torch.Generator(device).manual_seed(0)

        def gaussian(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device)

        sizes = SHAPES[shape][:layers]
        self.base = {f"{i}.to_q": (gaussian(*s) * 0.02).to(torch.bfloat16) for i, s in enumerate(sizes)}
        self._a = {m: gaussian(rank, w.shape[1]) for m, w in self.base.items()}
        self._b = {m: gaussian(w.shape[0], rank) for m, w in self.base.items()}
        self._step = {m: gaussian(w.shape[0], rank) for m, w in self.base.items()}
        self._unit = {m: float(w.float().norm() / (self._b[m] @ self._a[m]).norm()) for m, w in self.base.items()}
        self.publisher = Publisher(self.base, self.lora, formats=dict.fromkeys(self.base, self.format))
        self.amax = {m: frozen_amax(w) if self.format == "nvfp4" else None for m, w in self.base.items()}
        self.layers: dict[str, QuantizedLinear] = {
            m: LAYERS[tier](pack(self.format, w, self.amax[m]), None, w.shape[1]) for m, w in self.base.items()
        }
        self.model = nn.ModuleDict(
            {m.split(".")[0]: nn.ModuleDict({"to_q": layer}) for m, layer in self.layers.items()}
        )

    def factors(self, change: float) -> dict[str, torch.Tensor]:
        """Factors on the device, moved by `change` from those of `change` 0."""
        found = {}
        for module in self.base:
            found[f"{module}.lora_A"] = self._a[module]
            found[f"{module}.lora_B"] = self._unit[module] * (DRIFT * self._b[module] + change * self._step[module])
        return found

    def refresh(self, factors: dict[str, torch.Tensor]) -> None:
        """What an explorer in mode ``lora`` does, and a learner all but the swap."""
        for module, layer in self.layers.items():
            merged = merge_module(self.base[module], module, factors, 1.0)
            layer.load(pack(self.format, merged, self.amax[module]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def median(function: Callable[[], Any], repeats: int) -> float:
    function()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def sizes(world: World, before: Revision) -> list[dict[str, float]]:
    """One row a relative change: bytes on the wire."""
    rows = []
    for change in CHANGES:
        publications = Publications(Publish())
        publications.publish(before)
        after = publications.publish(world.publisher.build(2, world.factors(change)))
        whole = sum(tensor.nbytes for tensor in after.revision.packed.values())
        sent = sum(t.nbytes for t in (after.whole() | dict(after.deltas)).values())
        row = {"change": change, "packed_bytes": whole, "delta_bytes": sent, "share": sent / whole}
        row |= {"payload_bytes": len(after.payload(EXPLORER)), "factors_bytes": len(after.payload(REGENERATOR))}
        rows.append(row)
        print(
            f"weights move by {change:7.2%}   packed {whole / 1e6:9.2f} MB   delta {sent / 1e6:8.2f} MB"
            f" = {sent / whole:6.2%}   payload {row['payload_bytes'] / 1e6:8.2f} MB"
            f"   factors {row['factors_bytes'] / 1e6:8.2f} MB",
            flush=True,
        )
    return rows


def times(world: World, before: Revision, repeats: int) -> dict[str, float]:
    """Median seconds."""
    factors = world.factors(1e-3)
    content = Publications(Publish()).publish(before).payload(EXPLORER, full=True)
    receiver = Receiver(world.model)
    found = {
        "merge, quantise, swap": median(lambda: world.refresh(factors), repeats),
        "learner: merge, quantise, checksums": median(lambda: world.publisher.shard(2, factors), repeats),
        "prove": median(
            lambda: tensors_digest({f"{m}.{n}": t for m, x in world.layers.items() for n, t in x.tensors().items()}),
            repeats,
        ),
        "explorer: a snapshot, all of it": median(lambda: receiver.apply(payload.read(content)), repeats),
    }
    for name, seconds in found.items():
        print(f"{name:<38} {seconds:8.4f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES), nargs="?", default="testbed")
    parser.add_argument("--layers", type=int, help="take only the first so many layers")
    parser.add_argument("--tier", choices=sorted(LAYERS), help="default: fp8 on a GPU, nvfp4-emulated on a CPU")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only-steps", action="store_true", help="neither sizes nor the times of single stages")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device, load = torch.device(arguments.device), os.getloadavg()[0]
    tier = arguments.tier or ("fp8" if device.type == "cuda" else "nvfp4-emulated")
    make = partial(World, arguments.shape, arguments.layers, tier, arguments.rank, device)
    content: dict[str, Any] = {
        "question": "bytes and seconds of a policy revision",
        "shape": arguments.shape,
        "tier": tier,
        "rank": arguments.rank,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "load_before": load,
        "torch": torch.__version__,
    }
    with torch.no_grad():
        world = make()
        content |= {"layers": len(world.base), "weights": sum(weight.numel() for weight in world.base.values())}
        if not arguments.only_steps:
            before = world.publisher.build(1, world.factors(0.0))
            content |= {"sizes": sizes(world, before), "seconds": times(world, before, arguments.repeats)}
        del world  # two processes have one of their own
        if device.type == "cuda":
            torch.cuda.empty_cache()
        content["steps"] = steps(make, device=device, repeats=arguments.repeats)
    arguments.out.mkdir(parents=True, exist_ok=True)
    kind = "publish_steps" if arguments.only_steps else "publish"
    file = arguments.out / f"{kind}_{arguments.shape}_{device.type}.json"
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
