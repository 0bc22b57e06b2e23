"""From the end of an update to the first preview: which step of publishing a revision takes how long.

`publish.py` runs it. As in a run, the rank of the learners and an explorer are processes of their own, and what passes
between them and the controller, which is this process, goes through Ray's object store. The model is the touched layers
alone: there are no forwards. Steps are named ``<process>: <what it does>``; those of one iteration follow each other as
they do in a run, and `OFF_PATH` says which of them nobody waits for.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from solrl_ray.common import ray_auth
from solrl_ray.common.tensor_serialization import to_host
from solrl_ray.config.schema import Lora, Publish
from solrl_ray.learning.state import LearnerState
from solrl_ray.policy.digest import lora_digest
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.publication import EXPLORER, Publications
from solrl_ray.weight_sync.publish import RevisionShard, assemble
from solrl_ray.weight_sync.receive import Receiver
from solrl_ray.weight_sync.store import RevisionStore

DEADLINE = 180.0
"""Of each call, seconds."""
OFF_PATH = ("checkpoint: state files", "checkpoint: revision files", "controller: apply the deltas")
CHANGE = 1e-3
"""By which the merged weights move from one revision to the next, as a share of their norm."""
FIRST = 2
"""Revisions that are not counted: the first is a snapshot, and memory that is used again comes with the next."""


class Stopwatch:
    """Seconds of steps that follow each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._began
        self._began = now


class Rank:
    """The learners' side."""

    def __init__(self, world: Any) -> None:
        self._world = world()

    def ready(self) -> Lora:
        return self._world.lora

    def state(self, updates: int) -> tuple[LearnerState, float]:
        factors = self._world.factors(CHANGE * updates)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        parts = {name: to_host(factors) for name in ("default", "old", "ema", "exp_avg", "exp_avg_sq")}
        return LearnerState(updates=updates, steps=updates, **parts), time.perf_counter() - began

    def shard(self, updates: int, parent: int | None) -> tuple[RevisionShard, float]:
        factors = self._world.factors(CHANGE * updates)
        began = time.perf_counter()
        shard = self._world.publisher.shard(updates, factors, parent=parent, keep=True)
        return shard, time.perf_counter() - began


class Explorer:
    """Holds live layers."""

    def __init__(self, world: Any) -> None:
        self._receiver = Receiver(world().model)

    def ready(self) -> None: ...

    def load(self, content: np.ndarray) -> dict[str, float]:
        watch = Stopwatch()
        received = payload.read(content)
        watch.lap("explorer: verify the payload")
        self._receiver.apply(received)
        watch.lap("explorer: decode, swap, prove")
        return watch.seconds


class Controller:
    def __init__(self, world: Any, folder: Path, *, gpus: float) -> None:
        import ray

        self._ray, self._folder = ray, folder
        self._rank = ray.remote(num_cpus=1, num_gpus=gpus)(Rank).remote(world)
        self._explorer = ray.remote(num_cpus=1, num_gpus=gpus)(Explorer).remote(world)
        self._lora: Lora = ray.get(self._rank.ready.remote(), timeout=DEADLINE)
        ray.get(self._explorer.ready.remote(), timeout=DEADLINE)
        self._publications, self._store = Publications(Publish()), RevisionStore(folder / "revisions")

    def iteration(self, updates: int) -> dict[str, float]:
        """Seconds of each step from update `updates` on."""
        ray, watch = self._ray, Stopwatch()
        state, seconds = ray.get(self._rank.state.remote(updates), timeout=DEADLINE)
        watch.lap("state: to the controller")
        watch.seconds["state: to the controller"] -= seconds
        watch.seconds["rank: state to the host"] = seconds
        state.check_finite()
        watch.lap("controller: state is finite")
        lora_digest(state.default)
        watch.lap("controller: digest of the trained factors")
        parent = self._publications.parent(updates)
        number = None if parent is None else parent.manifest.revision
        shard, seconds = ray.get(self._rank.shard.remote(updates, number), timeout=DEADLINE)
        watch.lap("shard: to the controller")
        watch.seconds["shard: to the controller"] -= seconds
        watch.seconds["rank: merge, quantise, checksums, deltas"] = seconds
        revision = assemble([shard], self._lora, state.old, parent)
        watch.lap("controller: assemble")
        publication = self._publications.publish(revision)
        watch.lap("controller: publication")
        lora_digest(revision.factors)
        watch.lap("controller: digest of the sampling policy")
        content = publication.payload(EXPLORER)
        watch.lap("controller: make the payload")
        reference = ray.put(np.frombuffer(content, np.uint8))
        watch.lap("controller: share the payload")
        loaded: dict[str, float] = ray.get(self._explorer.load.remote(reference), timeout=DEADLINE)
        watch.lap("explorer: fetch")
        watch.seconds["explorer: fetch"] -= sum(loaded.values())
        watch.seconds |= loaded
        watch.lap("")
        del watch.seconds[""]
        state.save(self._folder / "checkpoints" / f"iteration-{updates:06d}")
        watch.lap(OFF_PATH[0])
        self._store.save(publication)
        self._store.prune(keep=2)
        watch.lap(OFF_PATH[1])
        publication.complete()
        watch.lap(OFF_PATH[2])
        return watch.seconds


def steps(world: Any, *, device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each step over `repeats` revisions that travel as deltas; prints them.

    Args:
        world: makes the touched layers with a publisher, in whatever process.
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
        print(f"{step:<44} {seconds:8.3f} s{'   nobody waits' if step in OFF_PATH else ''}", flush=True)
    path = sum(seconds for step, seconds in found.items() if step not in OFF_PATH)
    print(f"{'from the end of the update to a proof':<44} {path:8.3f} s", flush=True)
    return found
