"""The runtime with Ray: actors are processes, answers are awaited in asyncio, blocking work runs in daemon threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ray

from actors.cluster import capacity, wait
from actors.fleet.actor_factory import ActorFactory
from actors.monitoring.prometheus import PrometheusExporter
from actors.world import MetricsWriter, Process, Sent
from solrl_ray.common.deadlines import in_thread
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.report import trackers
from solrl_ray.report.page import build

T = TypeVar("T")


class RayWorld:
    """Implements `actors.world.World`; see there for the docstrings."""

    def __init__(self, factory: ActorFactory) -> None:
        self._factory = factory
        self.text_encoder = factory.text_encoder
        self.selector = factory.selector
        self.explorer = factory.explorer
        self.regenerator = factory.regenerator
        self.learner = factory.learner
        self.reserve_learner_bundles = factory.reserve_learner_bundles
        self.node: str = ray.get_runtime_context().get_node_id()

    def now(self) -> float:
        return time.monotonic()

    def process(self, actor: Any) -> Process:
        process: Process = actor.process
        return process

    def kill(self, actor: Any) -> None:
        actor.process.lost = True
        ray.kill(actor.handle, no_restart=True)

    def dismiss(self, actor: Any) -> None:
        self._factory.dismiss(actor)

    def abort(self, rank: Any) -> None:
        if rank.name and not rank.process.lost:
            rank.handle.abort.remote(rank.name)

    def send(self, actor: Any, method: str, *arguments: Any, parts: int = 1) -> Sent:
        called, role = ("call_as", (actor.name, method)) if actor.name else (method, ())
        call = getattr(actor.handle, called).options(name=f"{actor.role}.{method}", num_returns=parts)
        references = call.remote(*role, *arguments)
        answer, large = references if parts == 2 else (references, None)
        return Sent(answer, large, actor.process)

    async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
        with sent.process.waited_for(seconds) as deadline:
            return await wait.answer(sent.answer, what=what, seconds=deadline)

    def put(self, value: Any) -> Any:
        return ray.put(value)

    async def blocking(self, work: Callable[[], T], what: str, seconds: float) -> T:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await asyncio.wrap_future(in_thread(work, what))
        except TimeoutError:
            if not limit.expired():
                raise
            raise RunError(f"{what} passed its deadline of {seconds:g} s") from None

    def exporter(self, run: str) -> PrometheusExporter:
        return PrometheusExporter(run)

    def metrics_writers(self, folder: Path, first_iteration: int) -> list[MetricsWriter]:
        return [trackers.tensorboard(folder / "tensorboard", first_iteration=first_iteration)]

    def tracker(self, name: str, config: Config, folder: Path) -> MetricsWriter:
        return trackers.opened(name, config, folder)

    def write_report(self, folder: Path) -> None:
        build(folder)

    def draining_nodes(self) -> frozenset[str]:
        return frozenset(capacity.draining())

    def survey(self, config: Config) -> list[str]:
        return [f"{entry.missing} of {entry.request.key}" for entry in capacity.survey(config) if entry.missing]
