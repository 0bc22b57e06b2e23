"""One worker's life, as a coroutine: place → start → warm up → load → units → leave.

::

    WAITING ─► STARTING ─► STALE ─► READY ─► … ─► DRAINING     (`solrl_ray.scheduling.worker_state`)
                             ▲         │
                             └─ new weights

Each wait has a deadline. The first wait that fails ends the life, and the pool decides what follows
(`actors.fleet.pool`). A worker does its calls in the order they were sent, so weights are loaded after earlier units.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from actors.dispatch.unit_router import Call, UnitRouter
from actors.world import Process, Sent, World
from solrl_ray.config.fleet import Deadlines
from solrl_ray.errors import Gone, Leaving, NonsenseError, RunError, UserError
from solrl_ray.records import Attestation, Receipt, Refusal, WorkUnit
from solrl_ray.scheduling.dispatcher import Held
from solrl_ray.scheduling.worker_state import State, advance, role_of
from solrl_ray.weight_sync.publication import CARD, EXPLORER, Content, Publication

PING_SECONDS = 2.0
"""Seconds between two pings of an idle worker, which reveal a death before there is work."""

PLACE_SECONDS = 60.0
"""Seconds without a place after which the user is told, if other workers of the pool are at work."""


class PayloadRefs:
    """A publication's payloads, each put into the object store once, when first needed, for whichever roles."""

    def __init__(self, publication: Publication, world: World, seconds: float) -> None:
        """`seconds`: the deadline of making one."""
        self.publication = publication
        self._world = world
        self._seconds = seconds
        self._made: dict[Content, tuple[Any, int]] = {}
        self._turn = asyncio.Lock()

    async def ref(self, role: str, *, full: bool = False) -> Any:
        """Reference of the payload for a role; `full`: see `Publication.content`."""
        return (await self._payload(self.publication.content(role, full=full)))[0]

    async def size(self, role: str) -> int:
        """Bytes of the tensors in the payload for a role."""
        return (await self._payload(self.publication.content(role)))[1]

    async def _payload(self, content: Content) -> tuple[Any, int]:
        async with self._turn:  # if who makes it leaves, the next one does
            if content not in self._made:
                what = f"making the payload of {self.publication.name}"
                self._made[content] = await self._world.blocking(lambda: self._make(content), what, self._seconds)
        return self._made[content]

    def _make(self, content: Content) -> tuple[Any, int]:
        payload = self.publication.payload_of(content)
        return self._world.put(payload), payload.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What the workers of a pool should hold."""

    payloads: PayloadRefs
    probe: Any
    """Reference of the prompt embedding of the probe forward."""

    @property
    def publication(self) -> Publication:
        return self.payloads.publication

    @property
    def holds(self) -> Held:
        manifest = self.publication.revision.manifest
        return manifest.policy, manifest.revision


class Observer(Protocol):
    """Is told of events of a pool's workers; `actors.fleet.fleet.Fleet` is one."""

    def started(self, worker: Worker, attestation: Attestation) -> None:
        """Raises RunError if its answers would have other bits than its pool's."""

    def loaded(self, receipt: Receipt, publication: Publication, waited: float) -> None:
        """It loaded a publication after waiting `waited` seconds. Raises RunError if the receipt is wrong."""

    def resynced(self, worker: str, reason: str) -> None: ...

    def changed(self) -> None:
        """Something about a worker has changed."""

    def unplaced(self, worker: str, seconds: float, at_work: int) -> None:
        """It has waited so long for a place while others of its pool are at work; called once."""

    def lost(self, worker: str, reason: str, replacement: str, requeued: int, process: Process) -> None:
        """`replacement`: empty if the worker was leaving."""

    def unfit(self, worker: str, reason: str) -> None:
        """It joined others at work but could not start, or would work otherwise than they do."""

    def left(self, worker: str) -> None: ...


class Worker:
    def __init__(
        self,
        name: str,
        pool: str,
        actor: Any,
        *,
        world: World,
        deadlines: Deadlines,
        unit_seconds: float,
        weights: Callable[[], Weights | None],
        alone: Callable[[], bool],
        unplaced: Callable[[Worker, float, float | None], None],
        observer: Observer,
        router: UnitRouter,
    ) -> None:
        """
        Args:
            pool: its pool's name, as in `config.pools`.
            unit_seconds: deadline of one unit, in evaluations of each of its prompts.
            weights: what it should hold now.
            alone: whether no other worker of its pool is placed and stays.
            unplaced: called repeatedly while this worker has no place, with the seconds that it has waited; once these
                are the deadline, also with the time when they began. Raises RunError if there is no place to wait for.
        """
        self.name = name
        self.pool = pool
        self.actor = actor
        self.state = State.WAITING
        self.node = ""
        """Id of the node that it was placed on."""
        self.tier = ""
        """The tier that it attested."""
        self.proved = False
        """Whether it ever held a revision."""
        self.warm_ups = self.warmed = 0
        """Shapes of its forward to compile before anything else, and those done."""
        self._world, self._deadlines, self._unit_seconds = world, deadlines, unit_seconds
        self._weights, self._alone, self._unplaced = weights, alone, unplaced
        self._observer, self._router = observer, router
        self._step = "waiting for a place"
        """What it does or waits for, where its state does not say it."""
        self._loaded: Weights | None = None
        self._changed = asyncio.Event()
        self._answers = asyncio.TaskGroup()
        self._idle_since = world.now()

    @property
    def process(self) -> Process:
        return self._world.process(self.actor)

    @property
    def is_alone(self) -> bool:
        return self._alone()

    @property
    def units(self) -> list[WorkUnit]:
        """Its units, in the order in which it does them."""
        return self._router.units_of(self.name)

    def describe(self) -> str:
        """What it does, for the user."""
        if not self.units:
            return self._step or self.state.value
        words = f"{self.units[0].stage} {self.units[0].prompt_id[:6]}"
        return f"{words}, then leaves" if self.state is State.DRAINING else words

    # Called by its pool and the dispatcher

    def outdated(self) -> None:
        """It must load other weights: from now on it gets no unit until it has proved them."""
        self._advance("outdated")
        self._router.not_ready(self)
        if not self.units:
            self._idle_since = self._world.now()
        self._changed.set()

    def leave(self) -> None:
        """Finish its units, get no more, and end."""
        self._advance("leave")
        self._router.not_ready(self)
        self._changed.set()

    def give(self, unit: WorkUnit, call: Call) -> None:
        """Send a unit."""
        sent = self._world.send(self.actor, call.method, *call.arguments, parts=call.parts)
        self._answers.create_task(self._unit(unit, sent), name=f"{unit.id} on {self.name}")
        self._observer.changed()

    # Its life

    async def live(self) -> None:
        """Run until it has left. Raises what ends it earlier: WorkerGone, Leaving, or an error of its own."""
        await self._take_place()
        await self._start()
        async with self._answers:
            try:
                while self.state is not State.DRAINING:
                    self._changed.clear()
                    await self._next_step()
            finally:
                self._router.not_ready(self)

    async def _take_place(self) -> None:
        """Wait for room in the cluster, without a limit."""
        place = asyncio.ensure_future(
            self._world.answer(self._world.send(self.actor, "node"), what=f"a place for {self.name}", seconds=None)
        )
        limit = self._deadlines.resources + self._deadlines.start
        waited, since = 0.0, self._world.now()
        try:
            while not place.done():
                step = min(PLACE_SECONDS, limit - waited)
                await asyncio.wait([place], timeout=step)
                waited += step
                if not place.done():
                    self._unplaced(self, waited, since if waited >= limit else None)
                if waited >= limit:
                    waited, since = 0.0, self._world.now()
            self.node = await place
        finally:
            place.cancel()
        self._step = ""
        self._advance("placed")

    async def _start(self) -> None:
        """Have it build its model and attest its arithmetic; then compile, and wait for weights to load."""
        await self._let_learner_work()
        attestation: Attestation = await self._call("start", what="start", seconds=self._deadlines.start)
        self.tier, self.warm_ups = attestation.tier, attestation.warm_ups
        self._observer.started(self, attestation)
        self._now("waiting for a revision")
        while (weights := self._weights()) is None:
            await self._wait_for_change()
        for shape in range(self.warm_ups):
            await self._let_learner_work()
            self._now(f"warming up {shape + 1} of {self.warm_ups} shapes")
            seconds = self._deadlines.warm_up
            await self._call("warm_up", shape, weights.probe, what="warm-up", seconds=seconds)
            self.warmed += 1
        self._now("")
        self._idle_since = self._world.now()
        self._advance("started")

    async def _let_learner_work(self) -> None:
        """Wait until no rank of a rebuilt group needs this card; its own calls have deadlines."""
        while not self.process.learner_is_idle.is_set():
            self._now("waiting for the learner of its card")
            await self.process.learner_is_idle.wait()
            self._now("")

    async def _next_step(self) -> None:
        weights = self._weights()
        if weights is not None and weights is not self._loaded:
            # An explorer that joins as the first without a card waits for the next one, which is packed for it.
            if role_of(self.name) != EXPLORER or self.process.name or weights.publication.is_usable:
                await self._load(weights)
                return
            self._now("waiting for a revision that is packed for it")
        await self._wait_for_change()

    async def _load(self, weights: Weights) -> None:
        role = CARD if self.process.name else role_of(self.name)
        full = role == CARD and not self.process.learns  # without a learner there, factors must be sent
        while True:
            self._now(f"waiting for {weights.publication.name}")
            payload = await weights.payloads.ref(role, full=full)
            if weights is not self._weights():
                return
            self._now(f"loading {weights.publication.name}")
            answer: Receipt | Refusal = await self._call(
                "load_revision",
                payload,
                weights.probe,
                full,
                what=f"loading {weights.publication.name}",
                seconds=self._deadlines.publish,
            )
            if isinstance(answer, Receipt):
                break
            self._observer.resynced(self.name, answer.reason)
            full = True
        self._now("")
        self._observer.loaded(answer, weights.publication, self._world.now() - self._idle_since)
        self.proved, self._loaded = True, weights
        if weights is self._weights() and self.state is State.STALE:
            self._advance("proved")
            self._router.ready(self, weights.holds)

    async def _unit(self, unit: WorkUnit, sent: Sent) -> None:
        try:
            what = f"{unit.describe()} on {self.name}"
            seconds = self._unit_seconds * (1 + len(unit.beside))
            value = await self._world.answer(sent, what=what, seconds=seconds)
        except NonsenseError as error:
            self._router.nonsense(self, unit, str(error))
        except BaseException as error:
            if isinstance(error, Gone | Leaving) or self.state is State.DRAINING:
                own = None
            else:
                own = error if isinstance(error, RunError | UserError) else None
            if own is None:
                self._router.not_ready(self)  # its life ends, so it must not get more units
                raise
            self._router.failed(self, unit, own)
        else:
            self._router.answered(self, unit, value, sent.large)
        if self.state is State.STALE:
            self._idle_since = self._world.now()
        self._observer.changed()

    async def _wait_for_change(self) -> None:
        """Return when there is something to do; meanwhile, ping the idle worker."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            if not self.units:
                await self._call("alive", self.name, what="a sign of life", seconds=self._deadlines.fetch)
        self._changed.clear()

    async def prepare(self) -> None:
        """On a card: make what does not depend on the revision that will come. A loss is noticed by the next call."""
        with suppress(Gone, Leaving):
            await self._call("prepare", what="preparing for a revision", seconds=self._deadlines.publish)

    async def _call(self, method: str, *arguments: Any, what: str, seconds: float) -> Any:
        sent = self._world.send(self.actor, method, *arguments)
        return await self._world.answer(sent, what=f"{what} on {self.name}", seconds=seconds)

    def _now(self, step: str) -> None:
        self._step = step
        self._observer.changed()

    def _advance(self, event: str) -> None:
        self.state = advance(self.state, event)
        self._observer.changed()
