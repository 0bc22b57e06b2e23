"""How many bytes does a new policy revision send, and how long does each step take until an explorer has it?

    python benchmarks/publish.py                                   # the testbed's shapes, seconds on a CPU
    python benchmarks/publish.py flux --layers 4                   # FLUX.1-dev's shapes, 4 of the 190 layers with LoRA
    python benchmarks/publish.py flux --device cuda                # all of them: 1.79 B weights; under three minutes
    python benchmarks/publish.py flux --layers 24                  # a few hundred MB; minutes on a CPU

Base weights are Gaussian and B A is random with the LoRA's rank. From one revision to the next the merged weights move
by 0.1 % of their norm. Measures the bytes of the payloads and, through Ray, each step from the end of an update to the
proof of an explorer that receives packed weights: medians over the repetitions.

As in a run, the learner rank and the explorer are separate processes, and data between them and the controller (this
process) goes through Ray's object store. The model consists only of the layers with LoRA, so there are no forwards.
Steps are named ``<process>: <activity>``.

Prints a table; writes benchmarks/results/publish_<shape>_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solrl_ray.common import ray_auth
from solrl_ray.common.tensor_serialization import to_host
from solrl_ray.config.schema import Lora
from solrl_ray.learning.state import LearnerState
from solrl_ray.policy.digest import lora_digest
from solrl_ray.quantization.capability import device_name
from solrl_ray.quantization.formats import frozen_amax, pack
from solrl_ray.quantization.layers import QuantizedLinear
from solrl_ray.quantization.planning import FORMAT_OF_TIER
from solrl_ray.quantization.scope import LAYERS
from solrl_ray.weight_sync.payload import Payload
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publication
from solrl_ray.weight_sync.publish import Publisher, RevisionShard, assemble
from solrl_ray.weight_sync.receive import Receiver

RESULTS = Path(__file__).parent / "results"
SHAPES = {"testbed": [(128, 128)] * 28, "flux": [(3072, 3072)] * 190}
"""[out, in] of the layers modified by the published LoRA: to_q, to_k, to_v, to_out.0."""
DRIFT = 0.1
"""‖B A‖ / ‖W‖ of the previous revision."""
DEADLINE = 180.0
"""Limit of each call, in seconds."""
OFF_PATH = "checkpoint: state files"
"""The step that no process waits for."""
CHANGE = 1e-3
"""Change of the merged weights from one revision to the next, as a share of their norm."""
FIRST = 2
"""Uncounted first revisions: they allocate memory that later ones reuse."""


class World:
    """A model's layers with LoRA, its learner's publisher and an explorer's live layers."""

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


def sizes(before: Publication) -> dict[str, int]:
    """Print and return the bytes of both payloads."""
    found = {"packed": before.payload(EXPLORER).nbytes, "factors": before.payload(REGENERATOR).nbytes}
    for name, size in found.items():
        print(f"payload of {name:<8} {size / 1e6:9.2f} MB", flush=True)
    return found


class Stopwatch:
    """Measures the seconds of consecutive steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._began
        self._began = now


class Rank:
    """A learner rank: builds revisions."""

    def __init__(self, world: Callable[[], World]) -> None:
        self._world = world()
        self._buffers: dict[str, torch.Tensor] = {}

    def ready(self) -> Lora:
        return self._world.lora

    def state(self, updates: int) -> tuple[LearnerState, float]:
        factors = self._world.factors(CHANGE * updates)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        parts: dict[str, Any] = {name: to_host(factors) for name in ("default", "old", "ema", "exp_avg", "exp_avg_sq")}
        return LearnerState(updates=updates, steps=updates, **parts), time.perf_counter() - began

    def shard(self, updates: int) -> tuple[RevisionShard, float]:
        factors = self._world.factors(CHANGE * updates)
        began = time.perf_counter()
        shard = self._world.publisher.shard(updates, factors, buffers=self._buffers)
        return shard, time.perf_counter() - began


class Explorer:
    """An explorer: loads revisions into its live layers."""

    def __init__(self, world: Callable[[], World]) -> None:
        self._receiver = Receiver(world().model)

    def ready(self) -> None: ...

    def load(self, payload: Payload) -> dict[str, float]:
        watch = Stopwatch()
        payload.verify()
        watch.lap("explorer: verify the payload")
        self._receiver.apply(payload)
        watch.lap("explorer: swap, prove")
        return watch.seconds


class Controller:
    def __init__(self, world: Callable[[], World], folder: Path, *, gpus: float) -> None:
        import ray

        self._ray, self._folder = ray, folder
        self._rank = ray.remote(num_cpus=1, num_gpus=gpus)(Rank).remote(world)
        self._explorer = ray.remote(num_cpus=1, num_gpus=gpus)(Explorer).remote(world)
        self._lora: Lora = ray.get(self._rank.ready.remote(), timeout=DEADLINE)
        ray.get(self._explorer.ready.remote(), timeout=DEADLINE)

    def iteration(self, updates: int) -> dict[str, float]:
        """Publish update `updates`; returns the seconds of each step."""
        ray, watch = self._ray, Stopwatch()
        state, seconds = ray.get(self._rank.state.remote(updates), timeout=DEADLINE)
        watch.lap("state: to the controller")
        watch.seconds["state: to the controller"] -= seconds
        watch.seconds["rank: state to the host"] = seconds
        state.check_finite()
        watch.lap("controller: state is finite")
        lora_digest(state.default)
        watch.lap("controller: digest of the trained factors")
        shard, seconds = ray.get(self._rank.shard.remote(updates), timeout=DEADLINE)
        watch.lap("shard: to the controller")
        watch.seconds["shard: to the controller"] -= seconds
        watch.seconds["rank: merge, quantise, checksums"] = seconds
        revision = assemble([shard], self._lora, state.old)
        watch.lap("controller: assemble")
        lora_digest(revision.factors)
        watch.lap("controller: digest of the sampling policy")
        payload = Publication(revision=revision, mode="packed").payload(EXPLORER)
        watch.lap("controller: make the payload")
        reference = ray.put(payload)
        watch.lap("controller: share the payload")
        loaded: dict[str, float] = ray.get(self._explorer.load.remote(reference), timeout=DEADLINE)
        watch.lap("explorer: fetch")
        watch.seconds["explorer: fetch"] -= sum(loaded.values())
        watch.seconds |= loaded
        watch.lap("")
        del watch.seconds[""]
        state.save(self._folder / "checkpoints" / f"iteration-{updates:06d}")
        watch.lap(OFF_PATH)
        return watch.seconds


def steps(world: Callable[[], World], *, device: torch.device, repeats: int) -> dict[str, float]:
    """Print and return the median seconds of each step over `repeats` packed revisions.

    Args:
        world: builds the layers with a publisher, in any process.
    """
    ray_auth.settle(local=True)
    import ray

    gpus = 0.4 if device.type == "cuda" else 0.0
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        with tempfile.TemporaryDirectory() as folder:
            controller = Controller(world, Path(folder), gpus=gpus)
            rows = [controller.iteration(updates) for updates in range(1, 1 + FIRST + repeats)][FIRST:]
    finally:
        ray.shutdown()
    found = {step: statistics.median(row[step] for row in rows) for step in rows[0]}
    for step, seconds in found.items():
        print(f"{step:<44} {seconds:8.3f} s{'   in the background' if step == OFF_PATH else ''}", flush=True)
    path = sum(seconds for step, seconds in found.items() if step != OFF_PATH)
    print(f"{'from the end of the update to a proof':<44} {path:8.3f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES), nargs="?", default="testbed")
    parser.add_argument("--layers", type=int, help="take only this many of the layers")
    parser.add_argument("--tier", choices=sorted(LAYERS), help="default: fp8 on a GPU, nvfp4-emulated on a CPU")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
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
        content["sizes"] = sizes(Publication(revision=world.publisher.build(1, world.factors(0.0)), mode="packed"))
        del world  # the two other processes build their own
        if device.type == "cuda":
            torch.cuda.empty_cache()
        content["steps"] = steps(make, device=device, repeats=arguments.repeats)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"publish_{arguments.shape}_{device.type}.json"
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
