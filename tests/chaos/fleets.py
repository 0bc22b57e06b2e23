"""Fleets of small real actors, and what is told of them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from actors.cluster.rpc import Callee
from actors.dispatch.unit_router import Call
from actors.fleet.actor_factory import Actor
from actors.fleet.fleet import Fleet
from actors.fleet.pool import Pool
from actors.monitoring.telemetry import Telemetry
from actors.ray_world import RayWorld
from actors.world import Tasks
from solrl_ray.config.schema import Config
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.records import Attestation, Prompt, PromptEmbedding, Receipt, Refusal, WorkUnit
from solrl_ray.scheduling.worker_state import role_of
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.payload import Payload
from solrl_ray.weight_sync.publication import Publication
from solrl_ray.weight_sync.publish import assemble
from tests.support import weight_sync
from tests.support.patience import until
from tests.support.small import small_config

Failure = Callable[[], Exception]
"""Makes the error: Ray takes one of its own errors among an actor's arguments for a lost argument."""
_ORDERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Explored:
    unit: WorkUnit
    worker: str
    seconds: float = 0.0
    started: float = 0.0


class Worker(Callee):
    """Attests the score class it is told; fails in its start if it is told how and replaces nobody.

    It holds what it is sent, as it says itself.
    """

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

    def load_revision(self, payload: Payload, probe: Any, full: bool) -> Receipt | Refusal:
        manifest, role = payload.manifest, role_of(self._name)
        held = manifest.expected[role]
        return Receipt(
            worker=self._name,
            role=role,
            revision=manifest.revision,
            score_class=self._score_class,
            policy=manifest.policy,
            bound_modules=held.modules,
            buffer_digest=held.digest,
            probe_digest="",
        )

    def explore(self, unit: WorkUnit) -> Explored:
        return Explored(unit, self._name)


class Slow(Worker):
    """Is at its unit until the file appears."""

    def explore(self, unit: WorkUnit, gate: Path) -> Explored:  # type: ignore[override]
        while not gate.exists():
            time.sleep(0.05)
        return super().explore(unit)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def spawn(
    name: str,
    score_class: str = "A",
    failure: Failure | None = None,
    kind: type[Worker] = Worker,
    resources: dict[str, float] | None = None,
) -> Actor:
    made = ray.remote(kind).options(num_cpus=0, resources=resources).remote(name, score_class, failure)
    return Actor(made, role_of(name))


class Encoder(Callee):
    def start(self) -> dict[str, str]:
        return {}

    def embed(self, prompts: Sequence[Prompt]) -> list[PromptEmbedding]:
        return [PromptEmbedding(prompt_id=prompt.id, tensors={}, digest=embedding_digest({})) for prompt in prompts]


def encoder(name: str) -> Actor:
    return Actor(ray.remote(Encoder).options(num_cpus=0).remote(), "text_encoder")


def world(explorer: Callable[[str], Actor], regenerator: Callable[[str], Actor] = spawn) -> RayWorld:
    """Ray's, with these workers and no other actors than an encoder."""
    factory = SimpleNamespace(
        text_encoder=encoder,
        selector=None,
        explorer=explorer,
        regenerator=regenerator,
        learner=None,
        reserve_learner_bundles=None,
        dismiss=lambda actor: ray.kill(actor.handle),
    )
    return RayWorld(factory)  # type: ignore[arg-type]


def units(count: int) -> list[WorkUnit]:
    return [WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=f"p{n}", indices=(0,)) for n in range(count)]


def revision(number: int, policy: Policy = "old") -> Publication:
    factors = weight_sync.factors(scale=0.1 + number)
    shard = weight_sync.publisher().shard(number, factors, policy=policy)
    return weight_sync.publication(assemble([shard], weight_sync.LORA, factors))


@dataclass
class Scene:
    """A fleet, and what is told of it."""

    fleet: Fleet
    telemetry: Telemetry
    world: RayWorld
    config: Config
    tasks: Tasks
    answers: dict[str, str] = field(default_factory=dict)
    """Unit that was asked for → who did it."""
    requeued: int = 0
    """How often those units went to another worker."""

    @property
    def said(self) -> tuple[str, ...]:
        return self.telemetry.progress().messages

    @property
    def explorers(self) -> Pool:
        return self.fleet.explorers

    def describe(self) -> dict[str, str]:
        """Explorer → what it does."""
        return {name: worker.describe() for name, worker in self.explorers.workers.items()}

    def ask(self, wanted: Iterable[WorkUnit], *arguments: Any) -> None:
        """Of the explorers, in this order; `arguments`: of each call, after the unit. An error ends the run."""
        for unit in wanted:
            self.tasks.start(self._request(unit, Call("explore", (unit, *arguments))), unit.id)

    async def _request(self, unit: WorkUnit, call: Call) -> None:
        reply = await self.fleet.router.request(unit, call, pool="explorers", order=(next(_ORDERS),))
        self.answers[unit.id] = reply.worker
        self.requeued += reply.requeued

    def ready(self, pool: Pool | None = None) -> list[str]:
        return [name for name, each in (pool or self.explorers).workers.items() if each.describe() == "ready"]

    async def publish(self, role: str, publication: Publication, probe: str = "probe") -> None:
        """`probe`: stands for the embedding of the probe forward."""
        await self.fleet.publish(role, publication, ray.put(probe))

    async def says(self, sentence: str) -> None:
        """Return once a message has it."""
        await until(lambda: any(sentence in message for message in self.said))


def regenerator(name: str) -> Actor:
    return spawn(name, "C")


@asynccontextmanager
async def opened(
    folder: Path,
    explorer: Callable[[str], Actor] | type[Worker] = spawn,
    *overrides: str,
    regenerator: Callable[[str], Actor] = regenerator,
) -> AsyncIterator[Scene]:
    """An open fleet of such workers; one of each, unless an override says another number. What ends a run is raised."""
    if isinstance(explorer, type):
        explorer = functools.partial(spawn, kind=explorer)
    config, there = small_config(folder, "fleet", *overrides), world(explorer, regenerator)
    async with Tasks() as tasks:
        telemetry = Telemetry(config, RunFolder(folder), there)
        tasks.start(telemetry.keep_writing(), "writing metrics")
        fleet = Fleet(config, there, tasks, telemetry)
        fleet.open()
        yield Scene(fleet, telemetry, there, config, tasks)
