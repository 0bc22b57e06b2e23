"""The simulated world: the controller's outside in one process and one thread, under virtual time.

It has the methods of `actors.world.World`. An actor is a plain object with an inbox. It does its calls one after
another; each takes virtual seconds, and its answer is a future. What goes wrong, and when, is a list of faults: each
hits the n-th call that actors of a role are given.

::

    send ─► inbox ─► [ fault? ] ─► seconds ─► the method ─► [ fault? ] ─► answer
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from solrl_ray.config.schema import Config
from solrl_ray.errors import InputGone, Late, RunError, UserError, WorkerGone

T = TypeVar("T")

KINDS = {
    "dies before": "the process ends before it does the call",
    "dies after": "the process ends when the call is done, and its answer is lost",
    "hangs": "the call is never answered",
    "is slow": "the call takes ten times as long",
    "answers NaN": "the rewards are not finite",
    "answers another unit": "the answer is of another unit than was asked for",
    "cannot start": "the start raises an error",
    "is never placed": "there is no room for it",
    "lost its samples": "what it made went down with its node",
}
"""What can go wrong with an actor's call."""


@dataclass(frozen=True, slots=True)
class Fault:
    role: str
    call: int
    """Hits the first call from this number on, of all that actors of the role are given, that it can hit."""
    kind: str
    """A key of `KINDS`."""

    def __str__(self) -> str:
        return f"{self.role} {self.kind} (call {self.call})"


class Ref:
    """A reference: what it refers to is there once its maker has made it."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self.future = future
        self.lost = False

    @property
    def value(self) -> Any:
        """Raises InputGone if it is lost, or was never made."""
        if self.lost or not self.future.done() or self.future.cancelled() or self.future.exception() is not None:
            raise InputGone("an input", "an object it needs is lost")
        return self.future.result()


@dataclass(frozen=True, slots=True)
class Sent:
    """As `actors.world.Sent`."""

    answer: Ref
    large: Ref | None


@dataclass(slots=True)
class _Call:
    method: str
    arguments: tuple[Any, ...]
    parts: int
    sent: Sent


@dataclass(eq=False)
class SimulatedActor:
    """An actor, alive until it is killed."""

    name: str
    role: str
    player: Any
    """A plain object with the role's methods."""
    inbox: asyncio.Queue[_Call] = field(default_factory=asyncio.Queue)
    waiting: list[_Call] = field(default_factory=list)
    """Calls that are not answered."""
    life: asyncio.Task[None] | None = None
    alive: bool = True


class SimulatedWorld:
    """`actors.world.World`, with the players of a run and the faults that happen to it."""

    node = "node-0"

    def __init__(
        self,
        make: Callable[[str, str], Any],
        *,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        crash_at: int | None = None,
    ) -> None:
        """
        Args:
            make: the player of a role with a name.
            seed: of how long each call takes.
            crash_at: the number of the call with whose sending the controller dies; None: it does not.
        """
        self._make = make
        self._random = random.Random(seed)
        self._faults = sorted(faults, key=lambda fault: fault.call)
        self._crash_at = crash_at
        self._given: Counter[str] = Counter()
        self._sent = 0
        self.actors: list[SimulatedActor] = []
        self.happened: list[str] = []
        """Faults that have hit a call."""
        self.trace: list[str] = []
        """What was sent and answered, with the time."""
        self.crashed = asyncio.Event()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # Actors

    def text_encoder(self) -> SimulatedActor:
        return self._spawn("text_encoder", "text_encoder")

    def selector(self, name: str) -> SimulatedActor:
        return self._spawn("selector", name)

    def explorer(self, name: str) -> SimulatedActor:
        return self._spawn("explorer", name)

    def regenerator(self, name: str) -> SimulatedActor:
        return self._spawn("regenerator", name)

    def learner(self, rank: int, rebuilt: int) -> SimulatedActor:
        return self._spawn("learner", f"learner-{rank}.{rebuilt}")

    def explore_with(self, config: Config) -> None:
        """Every explorer computes in the same tier here."""

    def seat_learners(self, seconds: float) -> bool:
        return True

    def kill(self, actor: SimulatedActor) -> None:
        self._die(actor, "it was killed")

    def living(self) -> list[str]:
        """Names of actors that live."""
        return [actor.name for actor in self.actors if actor.alive]

    # Calls

    def send(self, actor: SimulatedActor, method: str, *arguments: Any, parts: int = 1) -> Sent:
        loop = asyncio.get_running_loop()
        large = Ref(loop.create_future()) if parts == 2 else None
        sent = Sent(Ref(loop.create_future()), large)
        self._sent += 1
        if self._sent == self._crash_at:
            self.happened.append("the controller dies")
            self.crashed.set()
        self._note(f"{actor.name} is sent {method}")
        call = _Call(method, arguments, parts, sent)
        actor.waiting.append(call)
        if actor.alive:
            actor.inbox.put_nowait(call)
        else:
            self._fail(call, actor, "the actor died")
        return sent

    async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await asyncio.shield(sent.answer.future)
        except TimeoutError:
            if not limit.expired():
                raise
            assert seconds is not None  # else it does not expire
            raise Late(what, seconds) from None
        except (WorkerGone, InputGone) as error:
            raise type(error)(what, error.reason) from None

    def put(self, value: Any) -> Ref:
        future = asyncio.get_running_loop().create_future()
        future.set_result(value)
        return Ref(future)

    # What blocks, and what is told to others

    async def blocking(self, work: Callable[[], T], what: str, seconds: float) -> T:
        await asyncio.sleep(self._random.uniform(0.0, 0.05))
        return work()

    def draining_nodes(self) -> frozenset[str]:
        return frozenset()

    def survey(self, config: Config) -> list[str]:
        return []

    def exporter(self, run: str) -> Any:
        return _Nobody()

    def metrics_writers(self, folder: Path, first_iteration: int) -> list[Any]:
        return []

    def write_report(self, folder: Path) -> None:
        """Nobody reads it."""

    # How an actor works

    def _spawn(self, role: str, name: str) -> SimulatedActor:
        actor = SimulatedActor(name, role, self._make(role, name))
        self.actors.append(actor)
        actor.life = asyncio.get_running_loop().create_task(self._live(actor), name=f"the process of {name}")
        return actor

    async def _live(self, actor: SimulatedActor) -> None:
        while True:
            call = await actor.inbox.get()
            self._given[actor.role] += 1
            fault = self._fault(actor.role, call)
            seconds = self._random.uniform(0.1, 1.0)
            if fault:
                self.happened.append(f"{actor.name} {fault} at {call.method}")
                self._note(self.happened[-1])
            if fault in ("hangs", "is never placed"):
                await asyncio.get_running_loop().create_future()
            if fault == "dies before":
                self._die(actor, "the worker died")
                return
            await asyncio.sleep(seconds * (10.0 if fault == "is slow" else 1.0))
            self._do(actor, call, fault)
            if fault == "dies after":
                self._die(actor, "the worker died")
                return

    def _fault(self, role: str, call: _Call) -> str:
        """What goes wrong with a call: the first fault whose turn has come and that is one of this kind of call."""
        for fault in self._faults:
            if fault.role == role and fault.call <= self._given[role] and self._applies(fault.kind, call):
                self._faults.remove(fault)
                return fault.kind
        return ""

    def _applies(self, fault: str, call: _Call) -> bool:
        """Whether a fault is one of this kind of call."""
        if fault.startswith("answers"):
            return call.method in ("explore", "audit", "sample")
        if fault == "cannot start":
            return call.method == "start"
        if fault == "is never placed":
            return call.method == "node"
        if fault == "lost its samples":
            return call.parts == 2
        return True

    def _do(self, actor: SimulatedActor, call: _Call, fault: str) -> None:
        if fault != "dies after":
            actor.waiting.remove(call)
        try:
            if fault == "cannot start":
                raise RunError(f"{actor.name} cannot start")
            arguments = [each.value if isinstance(each, Ref) else each for each in call.arguments]
            value = getattr(actor.player, call.method)(*arguments)
        except Exception as raised:
            error = raised
            if not isinstance(raised, RunError | UserError):  # as `actors.cluster.wait.translated`
                error = RunError(f"{actor.name} failed: {type(raised).__name__}: {raised}")
            self._note(f"{actor.name} raises {error}")
            if fault == "dies after":
                return
            call.sent.answer.future.set_exception(error)
            call.sent.answer.future.exception()  # it is looked at
            return
        if fault == "dies after":  # what it has written is there; what it answers is lost
            return
        if fault.startswith("answers"):
            value = actor.player.spoilt(value, fault)
        if call.sent.large is not None:
            value, large = value
            call.sent.large.future.set_result(large)
            call.sent.large.lost = fault == "lost its samples"
        if not call.sent.answer.future.done():
            call.sent.answer.future.set_result(value)
        self._note(f"{actor.name} answers {call.method}")

    def _die(self, actor: SimulatedActor, reason: str) -> None:
        if not actor.alive:
            return
        actor.alive = False
        for call in list(actor.waiting):
            self._fail(call, actor, reason)
        if actor.life is not None and actor.life is not asyncio.current_task():
            actor.life.cancel()

    def _fail(self, call: _Call, actor: SimulatedActor, reason: str) -> None:
        if call in actor.waiting:
            actor.waiting.remove(call)
        if not call.sent.answer.future.done():
            call.sent.answer.future.set_exception(WorkerGone(actor.name, f"its worker is gone: {reason}"))
            call.sent.answer.future.exception()  # it is looked at, also if nobody waits

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.now():.3f} {text}")


class _Nobody:
    """Takes what is exported, and does nothing with it."""

    def set(self, name: str, value: float, **tags: str) -> None: ...

    def add(self, name: str, value: float, **tags: str) -> None: ...

    def observe(self, name: str, value: float, **tags: str) -> None: ...
