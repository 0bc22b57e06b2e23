"""Pools of small real actors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from actors.cluster.rpc import Callee
from actors.fleet.budget import Budget
from actors.fleet.events import Event
from actors.fleet.pool import Pool
from solrl_ray.config.schema import Deadlines
from solrl_ray.records import Attestation, Receipt, WorkUnit

Failure = Callable[[], Exception]
"""Makes the error: Ray takes one of its own errors among an actor's arguments for a lost argument."""


class Worker(Callee):
    """Attests the score class it is told; fails in its start if it is told how and replaces nobody."""

    def __init__(self, name: str, score_class: str, failure: Failure | None) -> None:
        self._name = name
        self._score_class = score_class
        self._failure = None if "." in name else failure

    def start(self) -> Attestation:
        if self._failure is not None:
            raise self._failure()
        return Attestation(
            worker=self._name,
            device=f"device {self._score_class}",
            tier="bf16",
            score_class=self._score_class,
            checks={},
        )

    def load_revision(self, full: bool) -> Receipt:
        return Receipt(
            worker=self._name,
            role="explorer",
            revision=0,
            score_class=self._score_class,
            policy="old",
            bound_modules=1,
            buffer_digest="",
            probe_digest="",
        )


def load(handle: Any, full: bool) -> Any:
    return handle.load_revision.remote(full)


def spawn(
    name: str,
    score_class: str = "A",
    failure: Failure | None = None,
    kind: type[Worker] = Worker,
    resources: dict[str, float] | None = None,
) -> Any:
    return ray.remote(kind).options(num_cpus=0, resources=resources).remote(name, score_class, failure)


def pool_of(
    spawned: type[Worker] | Callable[[str], Any],
    *,
    max_inflight: int = 1,
    replacements: int = 0,
    deadlines: Deadlines | None = None,
) -> Pool:
    """A pool of this kind of worker, or of what the function starts; whoever opens a worker names it."""
    start = (lambda name: spawn(name, kind=spawned)) if isinstance(spawned, type) else spawned
    return Pool(
        start,
        unit_seconds=60.0,
        max_inflight=max_inflight,
        deadlines=deadlines or Deadlines(),
        budget=Budget(replacements),
    )


def settle(pool: Pool, events: int) -> list[Event]:
    happened: list[Event] = []
    deadline = time.monotonic() + 120.0
    while len(happened) < events:
        assert time.monotonic() < deadline
        ready, _ = ray.wait(pool.refs(), timeout=0.5)
        happened += pool.settle(set(ready))
    return happened


def units(count: int) -> list[WorkUnit]:
    return [WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=f"p{n}", indices=(0,)) for n in range(count)]
