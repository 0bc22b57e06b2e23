"""Life cycle of one worker, as a coroutine: get resources → start → warm up → load weights → units → leave.

::

    WAITING ─► STARTING ─► STALE ─► READY ─► … ─► DRAINING     (`solrl_ray.scheduling.worker_state`)
                             ▲         │
                             └─ new weights

Each wait has a deadline. The first wait that fails ends the coroutine, and the pool decides what follows
(`actors.fleet.pool`). A worker runs its calls in the order sent, so weights are loaded after earlier units.
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
"""Seconds between two pings of an idle worker, which reveal its death before the next unit."""

PLACE_SECONDS = 60.0
"""Seconds without resources after which the wait is reported, if other workers of the pool are working."""


class PayloadRefs:
    """Payloads of a publication. Each is put into the object store once, when first needed, and shared by all roles
    that need the same content.
    """

    def __init__(self, publication: Publication, world: World, seconds: float) -> None:
        """`seconds`: deadline for making one payload."""
        self.publication = publication
        self._world = world
        self._seconds = seconds
        self._made: dict[Content, tuple[Any, int]] = {}
        self._turn = asyncio.Lock()

    async def ref(self, role: str, *, full: bool = False) -> Any:
        """Reference to the payload for a role; `full`: see `Publication.content`."""
        return (await self._payload(self.publication.content(role, full=full)))[0]

    async def size(self, role: str) -> int:
        """Bytes of the tensors in the payload for a role."""
        return (await self._payload(self.publication.content(role)))[1]

    async def _payload(self, content: Content) -> tuple[Any, int]:
        async with self._turn:  # if the worker that makes it is cancelled, the next one makes it
            if content not in self._made:
                what = f"making the payload of {self.publication.name}"
                self._made[content] = await self._world.blocking(lambda: self._make(content), what, self._seconds)
        return self._made[content]

    def _make(self, content: Content) -> tuple[Any, int]:
        payload = self.publication.payload_of(content)
        return self._world.put(payload), payload.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights that the workers of a pool should hold."""

    payloads: PayloadRefs
    probe: Any
    """Reference to the prompt embedding of the probe forward."""

    @property
    def publication(self) -> Publication:
        return self.payloads.publication

    @property
    def holds(self) -> Held:
        manifest = self.publication.revision.manifest
        return manifest.policy, manifest.revision


class Observer(Protocol):
    """Receives the events of a pool's workers; implemented by `actors.fleet.fleet.Fleet`."""

    def started(self, worker: Worker, attestation: Attestation) -> None:
        """The worker has started. Raises RunError if its score class differs from that of its pool."""

    def loaded(self, receipt: Receipt, publication: Publication, waited: float) -> None:
        """The worker loaded a publication after `waited` seconds. Raises RunError if the receipt is wrong."""

    def resynced(self, worker: str, reason: str) -> None: ...

    def changed(self) -> None:
        """The displayed state of a worker has changed."""

    def unplaced(self, worker: str, seconds: float, at_work: int) -> None:
        """The worker has waited `seconds` for resources; `at_work` others of its pool are placed. Called once."""

    def lost(self, worker: str, reason: str, replacement: str, requeued: int, process: Process) -> None:
        """The worker was lost. `replacement`: name of its replacement, empty if the worker was leaving."""

    def unfit(self, worker: str, reason: str) -> None:
        """A worker that joined a working pool could not start, or would compute other results than the pool."""

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
            pool: name of its pool, as in `config.pools`.
            unit_seconds: deadline of one unit; in evaluations, of each prompt of a unit.
            weights: returns the weights that the worker should hold now.
            alone: returns True if this is the pool's only placed worker that is not draining.
            unplaced: called repeatedly while the worker waits for resources, with the seconds waited. When these reach
                the deadline, the third argument is the time at which the wait began, otherwise None. Raises RunError if
                waiting longer is pointless.
        """
        self.name = name
        self.pool = pool
        self.actor = actor
        self.state = State.WAITING
        self.node = ""
        """Id of its node; empty while it has no resources."""
        self.tier = ""
        """The precision tier that it attested."""
        self.proved = False
        """True once it has proved a revision."""
        self.warm_ups = self.warmed = 0
        """Number of forward shapes to compile before its first unit, and number compiled so far."""
        self._world, self._deadlines, self._unit_seconds = world, deadlines, unit_seconds
        self._weights, self._alone, self._unplaced = weights, alone, unplaced
        self._observer, self._router = observer, router
        self._step = "waiting for resources"
        """Current step in words; empty if `state` describes it."""
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
        """Its units, in the order in which it runs them."""
        return self._router.units_of(self.name)

    def describe(self) -> str:
        """The current activity, as shown to the user."""
        if not self.units:
            return self._step or self.state.value
        words = f"{self.units[0].stage} {self.units[0].prompt_id[:6]}"
        return f"{words}, then leaves" if self.state is State.DRAINING else words

    # Called by its pool and the dispatcher

    def outdated(self) -> None:
        """Other weights were published: the worker gets no unit until it has proved them."""
        self._advance("outdated")
        self._router.not_ready(self)
        if not self.units:
            self._idle_since = self._world.now()
        self._changed.set()

    def leave(self) -> None:
        """Finish the current units, take no more, and end."""
        self._advance("leave")
        self._router.not_ready(self)
        self._changed.set()

    def give(self, unit: WorkUnit, call: Call) -> None:
        """Send a unit."""
        sent = self._world.send(self.actor, call.method, *call.arguments, parts=call.parts)
        self._answers.create_task(self._unit(unit, sent), name=f"{unit.id} on {self.name}")
        self._observer.changed()

    # Life cycle

    async def live(self) -> None:
        """Run until the worker has left.

        Raises the error that ends it earlier: WorkerGone, Leaving, or RunError or UserError raised by the actor.
        """
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
        """Wait for resources in the cluster. `unplaced` decides how long."""
        place = asyncio.ensure_future(
            self._world.answer(self._world.send(self.actor, "node"), what=f"resources for {self.name}", seconds=None)
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
        """Build the model and attest its arithmetic; then compile, once the first weights are published."""
        await self._let_learner_work()
        attestation: Attestation = await self._call("start", what="start", seconds=self._deadlines.start)
        self.tier, self.warm_ups = attestation.tier, attestation.warm_ups
        self._observer.started(self, attestation)
        self._show_step("waiting for a revision")
        while (weights := self._weights()) is None:
            await self._wait_for_change()
        for shape in range(self.warm_ups):
            await self._let_learner_work()
            self._show_step(f"warming up {shape + 1} of {self.warm_ups} shapes")
            seconds = self._deadlines.warm_up
            await self._call("warm_up", shape, weights.probe, what="warm-up", seconds=seconds)
            self.warmed += 1
        self._show_step("")
        self._idle_since = self._world.now()
        self._advance("started")

    async def _let_learner_work(self) -> None:
        """Wait until no rank of a rebuilt learner group needs this GPU. The rank's calls have deadlines."""
        while not self.process.learner_is_idle.is_set():
            self._show_step("waiting for the learner on its GPU")
            await self.process.learner_is_idle.wait()
            self._show_step("")

    async def _next_step(self) -> None:
        weights = self._weights()
        if weights is not None and weights is not self._loaded:
            # The first explorer without a shared GPU needs packed weights, which only the next revision has.
            if role_of(self.name) != EXPLORER or self.process.name or weights.publication.is_usable:
                await self._load(weights)
                return
            self._show_step("waiting for the next revision, which has packed weights")
        await self._wait_for_change()

    async def _load(self, weights: Weights) -> None:
        role = CARD if self.process.name else role_of(self.name)
        full = role == CARD and not self.process.learns  # without a learner on the GPU, factors must be sent
        while True:
            self._show_step(f"waiting for {weights.publication.name}")
            payload = await weights.payloads.ref(role, full=full)
            if weights is not self._weights():
                return
            self._show_step(f"loading {weights.publication.name}")
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
        self._show_step("")
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
                self._router.not_ready(self)  # the worker is ending, so it must not get more units
                raise
            self._router.failed(self, unit, own)
        else:
            self._router.answered(self, unit, value, sent.large)
        if self.state is State.STALE:
            self._idle_since = self._world.now()
        self._observer.changed()

    async def _wait_for_change(self) -> None:
        """Return when something has changed; if nothing has, ping the idle worker and return."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            if not self.units:
                await self._call("alive", self.name, what="a sign of life", seconds=self._deadlines.fetch)
        self._changed.clear()

    async def prepare(self) -> None:
        """On a shared GPU: do the part of loading that does not depend on the revision. A lost worker is ignored here:
        the next call notices it.
        """
        with suppress(Gone, Leaving):
            await self._call("prepare", what="preparing for a revision", seconds=self._deadlines.publish)

    async def _call(self, method: str, *arguments: Any, what: str, seconds: float) -> Any:
        sent = self._world.send(self.actor, method, *arguments)
        return await self._world.answer(sent, what=f"{what} on {self.name}", seconds=seconds)

    def _show_step(self, step: str) -> None:
        self._step = step
        self._observer.changed()

    def _advance(self, event: str) -> None:
        self.state = advance(self.state, event)
        self._observer.changed()
