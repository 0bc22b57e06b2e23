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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from actors.dispatch.hand_out import HandOut
from actors.world import Sent, World
from solrl_ray.config.deadlines import Deadlines
from solrl_ray.errors import Gone, Leaving, NonsenseError, RunError, UserError
from solrl_ray.records import Attestation, Receipt, Refusal, WorkUnit
from solrl_ray.scheduling.dispatcher import Held
from solrl_ray.scheduling.worker_state import State, advance, role_of
from solrl_ray.weight_sync.publication import EXPLORER, Publication

PING_SECONDS = 2.0
"""Seconds between two pings of an idle worker, which reveal a death before there is work."""

PLACE_SECONDS = 60.0
"""Seconds without a place after which the user is told, if other workers of the pool are at work."""
WAITS_FOR_TURN = "waiting for its turn on the GPU"


class PayloadRefs:
    """A publication's payloads for one role, each put into the object store once, when first needed."""

    def __init__(self, publication: Publication, role: str, world: World, seconds: float) -> None:
        """`seconds`: the deadline of making one."""
        self._publication = publication
        self._role = role
        self._world = world
        self._seconds = seconds
        self._made: dict[bool, asyncio.Task[tuple[Any, int]]] = {}

    async def ref(self, *, full: bool) -> Any:
        """Reference of the payload; `full`: of the one that does not depend on what a worker holds."""
        return (await self._payload(full and self._publication.has_whole(self._role)))[0]

    async def size(self) -> int:
        """Bytes of the payload for workers that hold the revision before."""
        return (await self._payload(False))[1]

    async def _payload(self, full: bool) -> tuple[Any, int]:
        if full not in self._made:
            what = f"making the payload of {self._publication.name} for {self._role}s"
            self._made[full] = asyncio.ensure_future(
                self._world.blocking(lambda: self._make(full), what, self._seconds)
            )
        return await asyncio.shield(self._made[full])

    def _make(self, full: bool) -> tuple[Any, int]:
        content = self._publication.payload(self._role, full=full)
        # An array is read in place from the object store; bytes would be copied into each worker.
        return self._world.put(np.frombuffer(content, np.uint8)), len(content)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What the workers of a pool should hold."""

    publication: Publication
    payloads: PayloadRefs
    probe: Any
    """Reference of the prompt embedding of the probe forward."""

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
        turn: asyncio.Event,
        unplaced: Callable[[Worker, float, float | None], None],
        observer: Observer,
        hand_out: HandOut,
    ) -> None:
        """
        Args:
            pool: its pool's name, as in `config.pools`.
            unit_seconds: deadline of one unit.
            weights: what it should hold now.
            alone: whether no other worker of its pool is placed and stays.
            turn: set while it may load its model and weights; not set while others on the same GPU need the memory.
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
        """Whether it ever held a revision, which a delta needs."""
        self.warm_ups = self.warmed = 0
        """Shapes of its forward to compile before anything else, and those done."""
        self._world, self._deadlines, self._unit_seconds = world, deadlines, unit_seconds
        self._weights, self._alone, self._turn, self._unplaced = weights, alone, turn, unplaced
        self._observer, self._hand_out = observer, hand_out
        self._step = "waiting for a place"
        """What it does or waits for, where its state does not say it."""
        self._loaded: Weights | None = None
        self._began = False
        self._attested = False
        self._rests = False
        """Whether it gets no units because it is another's turn."""
        self._changed = asyncio.Event()
        self._answers = asyncio.TaskGroup()
        self._releases: list[asyncio.Future[None]] = []
        self._idle_since = world.now()

    @property
    def is_alone(self) -> bool:
        return self._alone()

    @property
    def units(self) -> list[WorkUnit]:
        """Its units, in the order in which it does them."""
        return self._hand_out.units_of(self.name)

    @property
    def is_to_start(self) -> bool:
        """Whether it has a place but has not built its model."""
        return self.state is State.STARTING and not self._attested

    @property
    def is_busy(self) -> bool:
        """Whether it has units, starts, compiles, or must load weights."""
        weights = self._weights()
        loads = self._attested and weights is not None and weights is not self._loaded
        return bool(self.units) or self.is_to_start or (loads and self.state is not State.DRAINING)

    def words(self) -> str:
        """What it does, for the user."""
        if not self.units:
            return self._step or (WAITS_FOR_TURN if self._rests else self.state.value)
        words = f"{self.units[0].stage} {self.units[0].prompt_id[:6]}"
        return f"{words}, then leaves" if self.state is State.DRAINING else words

    # Called by its pool and the dispatcher

    def outdated(self) -> None:
        """It must load other weights: from now on it gets no unit until it has proved them."""
        self._advance("outdated")
        self._hand_out.not_ready(self)
        if not self.units:
            self._idle_since = self._world.now()
        self._changed.set()

    def leave(self) -> None:
        """Finish its units, get no more, and end."""
        self._advance("leave")
        self._hand_out.not_ready(self)
        self._changed.set()

    def wake(self) -> None:
        """It is its turn."""
        self._changed.set()

    def release_gpu_memory(self) -> asyncio.Future[None]:
        """Give back GPU memory after its units; the future is done then, or when its life ends. A worker that is
        starting is waited for only where models may not be loaded outside its turn.
        """
        done = asyncio.get_running_loop().create_future()
        starts = self.state in (State.WAITING, State.STARTING)
        if starts and (self._turn.is_set() or not self._began):
            done.set_result(None)
        else:
            self._releases.append(done)
            self._changed.set()
        return done

    def give(self, unit: WorkUnit, batch: str, method: str, arguments: tuple[Any, ...], parts: int) -> None:
        """Send a unit: call `method`, which answers in `parts` parts."""
        sent = self._world.send(self.actor, method, *arguments, parts=parts)
        up_to_it = len(self.units) - self.units[::-1].index(unit)  # it may have several
        seconds = self._unit_seconds * up_to_it
        self._answers.create_task(self._unit(unit, batch, sent, seconds), name=f"{unit.id} on {self.name}")
        self._observer.changed()

    # Its life

    async def live(self) -> None:
        """Run until it has left. Raises what ends it earlier: WorkerGone, Leaving, or an error of its own."""
        try:
            await self._take_place()
            await self._start()
            async with self._answers:
                try:
                    while self.state is not State.DRAINING:
                        self._changed.clear()
                        await self._next_step()
                finally:
                    self._hand_out.not_ready(self)
        finally:
            _tell(self._releases)

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
        if not self._turn.is_set():
            self._now(WAITS_FOR_TURN)
        while not self._turn.is_set():  # everything in another's turn has deadlines
            await self._wait_for_change()
        self._began = True
        attestation: Attestation = await self._call("start", what="start", seconds=self._deadlines.start)
        self.tier, self.warm_ups = attestation.tier, attestation.warm_ups
        self._attested = True
        self._observer.started(self, attestation)
        self._now("waiting for a revision")
        await self._await_turn()
        while (weights := self._weights()) is None:
            await self._wait_for_change()
            await self._await_turn()
        for shape in range(self.warm_ups):
            await self._await_turn()
            self._now(f"warming up {shape + 1} of {self.warm_ups} shapes")
            seconds = self._deadlines.warm_up
            await self._call("warm_up", shape, weights.probe, what="warm-up", seconds=seconds)
            self.warmed += 1
        self._now("")
        self._idle_since = self._world.now()
        self._advance("started")

    async def _next_step(self) -> None:
        weights = self._weights()
        if self._releases or not self._turn.is_set():
            await self._await_turn()
        elif weights is not None and weights is not self._loaded:
            await self._load(weights)
        elif self._rests and weights is not None:
            self._ready(weights)
        else:
            await self._wait_for_change()

    async def _await_turn(self) -> None:
        """Give back GPU memory whenever asked, until it may be taken again."""
        while self._releases or not self._turn.is_set():
            if not self._turn.is_set():
                self._rests = True
                self._hand_out.not_ready(self)
            if not self._releases:
                await self._wait_for_change()
                continue
            releases, self._releases = self._releases, []
            try:
                seconds = self._deadlines.release_gpu_memory + self._unit_seconds * len(self.units)
                await self._call("release_gpu_memory", what="giving back GPU memory", seconds=seconds)
            finally:
                _tell(releases)

    def _ready(self, weights: Weights) -> None:
        """From now on it gets units, unless it leaves."""
        self._rests = False
        if self.state is State.READY:
            self._hand_out.ready(self, weights.holds)

    async def _load(self, weights: Weights) -> None:
        # A delta needs the revision before; a worker that never held one gets a snapshot.
        full = role_of(self.name) == EXPLORER and weights.publication.kind == "delta" and not self.proved
        while True:
            self._now(f"waiting for {weights.publication.name}")
            payload = await weights.payloads.ref(full=full)
            if weights is not self._weights():
                return
            self._now(f"loading {weights.publication.name}")
            seconds = self._deadlines.publish + self._unit_seconds * len(self.units)
            answer: Receipt | Refusal = await self._call(
                "load_revision",
                payload,
                weights.probe,
                full,
                what=f"loading {weights.publication.name}",
                seconds=seconds,
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
            self._ready(weights)

    async def _unit(self, unit: WorkUnit, batch: str, sent: Sent, seconds: float) -> None:
        try:
            value = await self._world.answer(sent, what=f"{unit.in_words} on {self.name}", seconds=seconds)
        except NonsenseError as error:
            self._hand_out.nonsense(self, unit, batch, error)
        except BaseException as error:
            own = error if isinstance(error, RunError | UserError) and not isinstance(error, Gone | Leaving) else None
            if own is None or not self._hand_out.failed(self, unit, batch, own):
                self._hand_out.not_ready(self)  # its life ends, so it must not get more units
                raise
        else:
            self._hand_out.answered(self, unit, batch, value, sent.large)
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

    async def _call(self, method: str, *arguments: Any, what: str, seconds: float) -> Any:
        sent = self._world.send(self.actor, method, *arguments)
        return await self._world.answer(sent, what=f"{what} on {self.name}", seconds=seconds)

    def _now(self, step: str) -> None:
        self._step = step
        self._observer.changed()

    def _advance(self, event: str) -> None:
        self.state = advance(self.state, event)
        self._observer.changed()


def _tell(releases: Iterable[asyncio.Future[None]]) -> None:
    """Tell the waiting tasks that the memory is free. Cancelled ones, as at the end of the run, no longer wait."""
    for release in releases:
        if not release.done():
            release.set_result(None)
