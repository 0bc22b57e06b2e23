"""Pools of small real actors, and what is told of them."""

from __future__ import annotations

import asyncio
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
from actors.dispatch.hand_out import Answer, HandOut, Owner
from actors.fleet.actor_factory import Actor
from actors.fleet.pool import Pool
from actors.fleet.worker import PayloadRefs, Weights
from actors.fleet.worker import Worker as Member
from actors.ray_world import RayWorld
from actors.world import Process, Tasks
from solrl_ray.config.deadlines import Deadlines
from solrl_ray.config.fleet import FleetConfig
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.records import Attestation, Prompt, PromptEmbedding, Receipt, Refusal, WorkUnit
from solrl_ray.scheduling.replacements import Replacements
from solrl_ray.scheduling.worker_state import role_of
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publication
from solrl_ray.weight_sync.publish import assemble
from tests.support import weight_sync
from tests.support.patience import SECONDS, until

Failure = Callable[[], Exception]
"""Makes the error: Ray takes one of its own errors among an actor's arguments for a lost argument."""
_NUMBERS = itertools.count()


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

    def load_revision(self, content: Any, probe: Any, full: bool) -> Receipt | Refusal:
        manifest, role = payload.read(content).manifest, role_of(self._name)
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
        explore_with=lambda config: None,
        seat_learners=None,
        dismiss=lambda actor: ray.kill(actor.handle),
    )
    return RayWorld(factory)  # type: ignore[arg-type]


def units(count: int) -> list[WorkUnit]:
    return [WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=f"p{n}", indices=(0,)) for n in range(count)]


def revision(number: int, policy: Policy = "old") -> Publication:
    factors = weight_sync.factors(scale=0.1 + number)
    shard = weight_sync.publisher().shard(number, factors, policy=policy)
    return weight_sync.publication(assemble([shard], weight_sync.LORA, factors))


class Batch(Owner):
    """Wants units done, and keeps the answers."""

    def __init__(self, hand_out: HandOut, *arguments: Any) -> None:
        """`arguments`: of each call, after the unit."""
        self._hand_out, self._arguments = hand_out, arguments
        self.batch = f"the batch {next(_NUMBERS)}"
        self.answers: dict[str, str] = {}
        """Unit → who did it."""
        self.values: dict[str, str] = {}
        """Unit → who says that it did it."""

    def call(self, unit: WorkUnit) -> tuple[str, tuple[Any, ...], int]:
        return "explore", (unit, *self._arguments), 1

    def take(self, answer: Answer) -> None:
        self.answers[answer.unit.id], self.values[answer.unit.id] = answer.worker, answer.value.worker
        self._hand_out.done(answer.unit)


@dataclass
class Told:
    """All that a pool tells of its workers, in its order: the word first."""

    events: list[tuple[Any, ...]] = field(default_factory=list)

    def started(self, worker: Member, attestation: Attestation) -> None:
        self.events.append(("started", worker.name))

    def loaded(self, receipt: Receipt, *rest: Any) -> None:
        self.events.append(("loaded", receipt.worker, receipt.revision))

    def resynced(self, worker: str, reason: str) -> None:
        self.events.append(("resynced", worker, reason))

    def unplaced(self, worker: str, seconds: float, at_work: int) -> None:
        self.events.append(("unplaced", worker, seconds, at_work))

    def lost(self, worker: str, reason: str, replacement: str, requeued: int, process: Process) -> None:
        self.events.append(("lost", worker, reason, replacement, requeued))

    def unfit(self, worker: str, reason: str) -> None:
        self.events.append(("unfit", worker, reason))

    def left(self, worker: str) -> None:
        self.events.append(("left", worker))

    def changed(self) -> None:
        pass

    # As the watcher of a hand-out

    def unit(self, worker: str, unit: WorkUnit, started: float, seconds: float) -> None:
        self.events.append(("answered", worker, unit.id))

    def struck(self, worker: str) -> None:
        self.events.append(("struck", worker))

    def message(self, text: str) -> None:
        self.events.append(("message", text))


@dataclass
class Stage:
    """A pool, who gives it units, and what is told of it."""

    pool: Pool
    hand_out: HandOut
    world: RayWorld
    told: Told
    replacements: Replacements

    @property
    def events(self) -> list[tuple[Any, ...]]:
        return self.told.events

    def of(self, word: str) -> list[tuple[Any, ...]]:
        """What was told of that, without the word."""
        return [tuple(rest) for first, *rest in self.events if first == word]

    async def holding(self, count: int, number: int = 0) -> None:
        """Have `count` workers, and return when all of them hold a revision."""
        self.pool.resize(count)
        self.publish(revision(number))
        await until(lambda: self.ready() == count)

    def publish(self, publication: Publication, probe: str = "probe") -> None:
        """`probe`: stands for the embedding of the probe forward."""
        payloads, factors = (PayloadRefs(publication, role, self.world, SECONDS) for role in (EXPLORER, REGENERATOR))
        self.pool.publish(Weights(publication, payloads, factors, ray.put(probe)))

    def ready(self) -> int:
        return self.pool.census()["ready"]

    def words(self) -> dict[str, str]:
        """Worker → what it does."""
        return {name: worker.words() for name, worker in self.pool.workers.items()}

    def ask(self, wanted: Iterable[WorkUnit], *arguments: Any) -> Batch:
        batch = Batch(self.hand_out, *arguments)
        self.hand_out.add(batch, wanted, "explorers")
        return batch


@asynccontextmanager
async def opened(
    spawned: type[Worker] | Callable[[str], Actor],
    *,
    max_inflight: int = 1,
    replacements: int = 0,
    unit_seconds: float = SECONDS,
    deadlines: Deadlines | None = None,
) -> AsyncIterator[Stage]:
    """An empty pool of explorers of this kind, or of what the function starts. What ends a run is raised."""
    start = (lambda name: spawn(name, kind=spawned)) if isinstance(spawned, type) else spawned
    there, told, left = world(start), Told(), Replacements(replacements)
    async with Tasks() as tasks:
        hand_out = HandOut(
            there, FleetConfig(max_inflight=max_inflight, hedge=0.0), told, lambda *ends: pool.retire(*ends)
        )
        pool = Pool(
            "explorers",
            there.explorer,
            unit_seconds=unit_seconds,
            world=there,
            tasks=tasks,
            hand_out=hand_out,
            deadlines=deadlines or Deadlines(),
            replacements=left,
            observer=told,
        )
        yield Stage(pool, hand_out, there, told, left)
