"""The simulated world: the controller's outside in one process and one thread, under virtual time.

It has the methods of `actors.world.World`. An actor is a plain object with an inbox. It does its calls one after
another; each takes virtual seconds, and its answer is a future. Files are on a disk in memory. Faults are given as a
list: each affects the n-th call of actors of a role, or the n-th operation of the disk.

::

    send ─► inbox ─► [ fault? ] ─► seconds ─► the method ─► [ fault? ] ─► answer
                                                  └─► the disk ─► [ fault? ]
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from actors.world import Process, Sent
from solrl_ray.config.schema import Config
from solrl_ray.errors import InputGone, Late, PeerGone, RunError, UserError, WorkerGone
from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.worker_state import pool_of, slot_of
from tests.simulated.deadlines import check_named, deadline
from tests.simulated.faults import HARMLESS, Fault, Faults
from tests.simulated.memory_disk import MemoryDisk, PowerLoss
from tests.simulated.processes import Call, Host, Ref, SimulatedActor
from tests.simulated.promises import Promises

T = TypeVar("T")

KILLED = "it was killed"
DRAINING = 30.0
"""Seconds for which a leaving node is still there."""
LATE = 1000.0
"""Factor of a late call's time."""
SLOW = 13.5
"""Seconds that a slow call takes, of a unit for each micro-batch."""
NOTICED = 60.0
"""Virtual seconds after which a death must have been told, if the run goes on as long."""
UNSYNCED = ("/run/lock", "/run/embeddings", "/run/trace.json")
"""What a run may lose with its machine."""


class SimulatedWorld:
    """`actors.world.World`, with the players of a run and its faults."""

    node = "node-0"

    def __init__(
        self,
        make: Callable[[str, str], Any],
        disk: MemoryDisk,
        *,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        nodes: int = 1,
        cards: int = 0,
        size: Callable[[WorkUnit], float] = lambda unit: 1.0,
        config: Config | None = None,
    ) -> None:
        """
        Args:
            make: the player of a role with a name.
            seed: of each call's time, and of what is lost with a failing node or disk.
            nodes: number of nodes for explorers, regenerators and cards.
            cards: number of learner ranks that share their processes with explorers and regenerators.
            size: factor of a unit's time.
            config: says which deadline each wait must have.
        """
        self._make, self._size, self._ranks, self._config = make, size, cards, config
        self._cards: dict[int, Host] = {}
        self._random = random.Random(seed)
        self.faults = Faults(faults)
        self.visits: dict[int, Callable[[], None]] = {}
        """Outside actions at the controller's n-th call."""
        self._nodes = [f"node-{number + 1}" for number in range(nodes)]
        self._draining: set[str] = set()
        self.disk = disk
        self._is_full = self._is_blocking = False
        disk.before, disk.user = self._use_disk, f"controller {seed}"
        self.actors: list[SimulatedActor] = []
        self.happened: list[str] = []
        """Faults so far."""
        self.trace: list[str] = []
        """Sent and answered calls, with the time."""
        self.promises = Promises()
        self.crashed = asyncio.Event()
        """Set when the controller has died."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # Actors

    def text_encoder(self, name: str) -> SimulatedActor:
        return self._spawn("text_encoder", name)

    def selector(self, name: str) -> SimulatedActor:
        return self._spawn("selector", name)

    def explorer(self, name: str) -> SimulatedActor:
        return self._spawn("explorer", name)

    def regenerator(self, name: str) -> SimulatedActor:
        return self._spawn("regenerator", name)

    def learner(self, rank: int, rebuilt: int) -> SimulatedActor:
        return self._spawn("learner", f"learner-{rank}.{rebuilt}")

    def reserve_learner_bundles(self, seconds: float) -> bool:
        return True

    def process(self, actor: SimulatedActor) -> Process:
        return actor.host.process

    def kill(self, actor: SimulatedActor) -> None:
        actor.host.process.lost = True
        self._die(actor.host, KILLED)

    def abort(self, rank: SimulatedActor) -> None:
        if rank.host.process.name:
            rank.aborted.set()

    def dismiss(self, actor: SimulatedActor) -> None:
        process = actor.host.process
        if actor.name in process.roles:
            process.roles.remove(actor.name)
        if not process.roles:
            self.kill(actor)
        actor.alive = False
        if actor.died is not None and actor.died > self.now() - NOTICED:
            actor.died = None  # it was replaced on purpose, before its death was noticed
        for call in list(actor.waiting):
            self._fail(call, actor, KILLED)

    @property
    def affected(self) -> list[frozenset[str]]:
        """For each process that the run may have lost, the names of it and of its actors."""
        hosts = {id(actor.host): actor.host for actor in self.actors if actor.host.cause}
        return [
            frozenset({host.process.name, *(actor.name for actor in host.actors)} - {""}) for host in hosts.values()
        ]

    # Calls

    def send(self, actor: SimulatedActor, method: str, *arguments: Any, parts: int = 1) -> Sent:
        loop = asyncio.get_running_loop()
        large = Ref(loop.create_future()) if parts == 2 else None
        sent = Sent(Ref(loop.create_future()), large, actor.host.process)
        if self._config is not None:
            sent.answer.seconds = deadline(self._config, actor.role, method, arguments)
        self._note(f"{actor.name} is sent {method}")
        self._meanwhile()
        call = Call(method, arguments, parts, sent)
        actor.waiting.append(call)
        if actor.alive and actor.host.alive:
            actor.host.inbox.put_nowait((actor, call))
        else:
            self._fail(call, actor, "the actor died")
        return sent

    async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
        if self._config is not None:
            assert seconds == sent.answer.seconds, f"{what} has {seconds} s instead of {sent.answer.seconds}"
        try:
            with sent.process.waited_for(seconds) as deadline:
                async with asyncio.timeout(deadline) as limit:
                    return await asyncio.shield(sent.answer.future)
        except TimeoutError:
            if not limit.expired():
                raise
            assert seconds is not None  # without a deadline there is no timeout
            raise Late(what, seconds) from None
        except (WorkerGone, InputGone) as error:
            raise type(error)(what, error.reason) from None

    def put(self, value: Any) -> Ref:
        future = asyncio.get_running_loop().create_future()
        future.set_result(value)
        return Ref(future)

    # Blocking work and output

    async def blocking(self, work: Callable[[], T], what: str, seconds: float) -> T:
        if self._config is not None:
            check_named(self._config, what, seconds)
        count = self.faults.counted("blocking")
        if self.faults.hits("controller", "hangs at the disk", count):
            self._happens(f"the controller hangs at the disk: {what}")
            await asyncio.sleep(seconds)
            raise RunError(f"{what} passed its deadline of {seconds:g} s")
        dies = self.faults.hits("controller", "dies beside the disk", count)
        if dies and self._random.random() < 0.5:
            await self._controller_dies(f"before {what}")
        await asyncio.sleep(self._random.uniform(0.0, 0.05))
        self._is_blocking = True
        self.disk.touched.clear()
        try:
            value = work()
        finally:
            self._is_blocking = False
        lost = [path for path in self.disk.at_risk() if not path.startswith(UNSYNCED)]
        assert not lost, f"{what} has ended, and a loss of power may take {lost}"
        if dies:
            await self._controller_dies(f"after {what}")
        return value

    def draining_nodes(self) -> frozenset[str]:
        return frozenset(self._draining)

    def survey(self, config: Config) -> list[str]:
        return []

    def exporter(self, run: str) -> Any:
        return _Nobody()

    def metrics_writers(self, folder: Path, first_iteration: int) -> list[Any]:
        return []

    def tracker(self, name: str, config: Config, folder: Path) -> Any:
        raise RunError("there is none in the simulated world")

    def write_report(self, folder: Path) -> None:
        """No test reads it."""

    # Faults outside an actor's calls

    def _meanwhile(self) -> None:
        """The controller has sent a call."""
        sent = self.faults.counted("sent")
        if sent in self.visits:
            self.visits[sent]()
        if self.faults.hits("controller", "dies", sent):
            self._happens("the controller dies")
            self._crash()
        if len(self._nodes) > 1 and self.faults.hits("node", "dies", sent):
            self._node_dies(self._random.choice(self._nodes))
        if len(self._nodes) > 1 and self.faults.hits("node", "drains", sent):
            node = self._random.choice(self._nodes)
            self._happens(f"{node} drains")
            self._nodes.remove(node)
            self._draining.add(node)
            asyncio.get_running_loop().call_later(DRAINING, self._node_dies, node)

    async def _controller_dies(self, when: str) -> None:
        self._happens(f"the controller dies {when}")
        self._crash()
        await asyncio.get_running_loop().create_future()

    def _crash(self) -> None:
        self.disk.gone.add(self.disk.user)
        self.crashed.set()

    def _node_dies(self, node: str) -> None:
        self._happens(f"{node} dies")
        if node in self._nodes:
            self._nodes.remove(node)
        told = node in self._draining
        self._draining.discard(node)
        for actor in self.actors:
            if actor.host.node == node:
                has_left = told and actor.role in ("explorer", "regenerator") and not actor.host.process.name
                if actor.host.alive and not has_left:
                    actor.host.cause = "its node dies"
                self._die(actor.host, "its node died")
                for made in actor.made:
                    made.lost = True

    def _use_disk(self, operation: str) -> None:
        """An operation of the disk begins. Raises PowerLoss, OSError."""
        user = self.disk.user
        if user in self.disk.gone:
            raise PowerLoss
        if user.startswith("controller") and not self._is_blocking:
            raise AssertionError(f"the controller uses the disk ({operation}) outside of World.blocking")
        count, hits = self.faults.counted("disk"), self.faults.hits
        if hits("disk", "loses power", count) or hits("disk", "loses power and a block", count):
            self._happens(f"{user} loses power at {operation}")
            self.disk.gone.add(user)
            if user.startswith("controller"):
                self.crashed.set()
            raise PowerLoss
        if not self._is_full and hits("disk", "is full", count):
            self._is_full = True
            self._happens("the disk is full")
        if self._is_full and operation in ("write", "create", "mkdir"):
            raise OSError(errno.ENOSPC, "No space left on device")

    def _happens(self, what: str) -> None:
        self.happened.append(what)
        self._note(what)

    # Actors

    def _spawn(self, role: str, name: str) -> SimulatedActor:
        player = self._make(role, name)
        number = slot_of(name) if role == "learner" or pool_of(name) in ("explorers", "regenerators") else self._ranks
        host = (
            self._card(number)
            if number < self._ranks
            else self._host(Process(), role not in ("selector", "text_encoder"))
        )
        actor = SimulatedActor(name, role, player, host, f"{name} ({len(self.actors)})")
        actor.alive = host.alive  # the controller may not know yet that a card is gone
        self.actors.append(actor)
        host.actors.append(actor)
        if host.process.name:
            host.process.roles.append(name)
        return actor

    def _card(self, number: int) -> Host:
        """The process of a card, a new one if it is gone."""
        if number not in self._cards or self._cards[number].process.lost:
            self._cards[number] = self._host(Process(f"card-{number}.{len(self.actors)}"), True)
        return self._cards[number]

    def _host(self, process: Process, anywhere: bool) -> Host:
        host = Host(self._random.choice(self._nodes if anywhere else [self.node]), process)
        host.life = asyncio.get_running_loop().create_task(self._live(host), name=f"the process of {process.name}")
        return host

    async def _live(self, host: Host) -> None:
        while True:
            actor, call = await host.inbox.get()
            if not actor.alive:
                continue
            fault = self._met(actor, call)
            sizes = [self._size(each) for each in call.arguments if isinstance(each, WorkUnit)]
            size = max(sizes, default=1.0)
            seconds = self._random.uniform(0.1, 1.0) * size
            if fault in ("hangs", "is never placed"):
                await asyncio.get_running_loop().create_future()
            if fault.startswith("dies before"):
                self._die(host, "the worker died")
                return
            await asyncio.sleep({"is slow": SLOW * size, "is late": LATE * seconds}.get(fault, seconds))
            if call.method == "update" and self._has_lost_a_peer(actor):
                await actor.aborted.wait()  # a collective that never ends
            controller, self.disk.user = self.disk.user, actor.user
            try:
                for _ in range(2 if fault == "comes twice" else 1):
                    self._do(actor, call, fault)
            except PowerLoss:
                fault = host.cause = "dies after"
            finally:
                self.disk.user = controller
            if fault == "dies after":
                self._die(host, "the worker died")
                return
            if fault == "hangs after":
                await asyncio.get_running_loop().create_future()

    def _met(self, actor: SimulatedActor, call: Call) -> str:
        """The kind of fault that a call meets; empty if there is none."""
        fault = self.faults.of_call(actor.role, call)
        if fault:
            self._happens(f"{actor.name} {fault} at {call.method}")
        if fault and fault not in HARMLESS:
            actor.host.cause = fault
        return fault

    def _do(self, actor: SimulatedActor, call: Call, fault: str) -> None:
        """Do a call and answer it; with ``dies after`` and ``hangs after``, its writes remain and its answer is
        lost.
        """
        try:
            self._prevent(actor, call, fault)
            arguments = [each.value if isinstance(each, Ref) else each for each in call.arguments]
            value: Any = actor.host.node if call.method == "node" else getattr(actor.player, call.method)(*arguments)
        except Exception as raised:
            error = raised
            if not isinstance(raised, RunError | UserError):  # as `actors.cluster.wait.translated`
                error = RunError(f"{actor.name} failed: {type(raised).__name__}: {raised}")
            self._note(f"{actor.name} raises {error}")
            if not fault.endswith("after"):
                self._answer(actor, call, error)
            return
        if fault.endswith("after"):
            return
        if fault.startswith("answers"):
            value = actor.player.spoilt(value, fault)
        if call.sent.large is not None:
            value, made = value
            if not call.sent.large.future.done():
                call.sent.large.future.set_result(made)
                call.sent.large.lost = fault == "lost its samples"
                actor.made.append(call.sent.large)
        self._note(f"{actor.name} answers {call.method}")
        self._answer(actor, call, value)

    def _prevent(self, actor: SimulatedActor, call: Call, fault: str) -> None:
        """Raise what keeps a player from doing a call."""
        if fault == "cannot start":
            raise RunError(f"{actor.name} cannot start")
        if fault == "loses its input":
            raise InputGone("an input", "an object it needs is lost")
        if call.method == "update" and self._has_lost_a_peer(actor):
            raise PeerGone(actor.name, "another rank of its group is lost")

    def _has_lost_a_peer(self, rank: SimulatedActor) -> bool:
        group = rank.name.partition(".")[2]
        ranks = [actor for actor in self.actors if actor.role == "learner" and actor.name.partition(".")[2] == group]
        return not all(actor.alive for actor in ranks)

    def _answer(self, actor: SimulatedActor, call: Call, value: Any) -> None:
        with suppress(ValueError):  # it died meanwhile, and no task waits
            actor.waiting.remove(call)
        answer = call.sent.answer.future
        if answer.done():
            return
        if isinstance(value, Exception):
            answer.set_exception(value)
            answer.exception()  # marks the exception as retrieved
        else:
            answer.set_result(value)

    def _die(self, host: Host, reason: str) -> None:
        if not host.alive:
            return
        host.alive = False
        for actor in [each for each in host.actors if each.alive]:
            actor.alive = False
            actor.died = self.now() if reason != KILLED else None
            for call in list(actor.waiting):
                self._fail(call, actor, reason)
            if actor.role == "selector" and self._random.random() < 0.5:  # its machine fails, not only the process
                self.disk.gone.add(actor.user)
                for folder in ("journal", "samples"):
                    self.disk.lose_power(self._random.randrange(1 << 30), f"/run/{folder}")
            if host.cause.endswith("damaged"):
                damage_a_line(self.disk, self._random)
        if host.life is not None and host.life is not asyncio.current_task():
            host.life.cancel()

    def _fail(self, call: Call, actor: SimulatedActor, reason: str) -> None:
        self._answer(actor, call, WorkerGone(actor.name, f"its worker is gone: {reason}"))

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.now():.3f} {text}")


def damage_a_line(disk: MemoryDisk, chance: random.Random) -> None:
    """In one of the two newest journals, which may be open."""
    journals = sorted(path for path in disk.path("/run/journal").glob("*.jsonl") if path.read_bytes())
    if journals:
        disk.alter(str(chance.choice(journals[-2:])), chance)


class _Nobody:
    """Ignores all exports."""

    def set(self, name: str, value: float, **tags: str) -> None: ...

    def add(self, name: str, value: float, **tags: str) -> None: ...

    def observe(self, name: str, value: float, **tags: str) -> None: ...
