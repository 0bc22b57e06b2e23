"""A pool of workers of one role: calls in flight, their deadlines, and replacing whoever is lost.

Pure bookkeeping over actor handles; who gets which unit is the ledger's business. One worker's life is
`scheduling.worker_state`; its calls queue on the actor in order, so a revision sent before a unit is loaded before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray

from actors.cluster import capacity, wait
from actors.cluster.rpc import send
from actors.fleet.budget import Budget
from actors.fleet.events import (
    Done,
    Event,
    Left,
    Lent,
    Loaded,
    Lost,
    Nonsense,
    Refused,
    Rested,
    Started,
    Unfit,
    Warmed,
)
from actors.fleet.member import Call, Member
from actors.fleet.places import Places
from actors.fleet.roll import Roll
from actors.workers.termination import Leaving, present
from solrl_ray.config.schema import Deadlines
from solrl_ray.errors import NonsenseError, RunError, UserError
from solrl_ray.records import Refusal, WorkUnit
from solrl_ray.scheduling.worker_state import State, advance, replacement_name, role_of

WANTED = 2.0
"""How long after somebody asked for free slots there still counts as being work, seconds."""

LOOK = 0.2
"""Between two looks at deadlines, seconds: they are of every call in flight."""

Load = Callable[[Any, bool], Any]
"""Makes the call that has a worker load a revision: ``load(handle, full)``."""
WarmUp = Callable[[Any, int], Any]
"""Makes the call that has a worker compile for one shape of its forward: ``warm_up(handle, shape)``."""


class Pool:
    def __init__(
        self,
        spawn: Callable[[str], Any],
        *,
        unit_seconds: float,
        max_inflight: int,
        deadlines: Deadlines,
        budget: Budget,
    ) -> None:
        """
        Args:
            spawn: makes the actor of a given name and returns its handle without waiting for it.
            unit_seconds: deadline of one unit.
            max_inflight: units in flight per worker.
        """
        self._spawn = spawn
        self._unit_seconds = unit_seconds
        self._max_inflight = max_inflight
        self._deadlines = deadlines
        self._budget = budget
        self._members: dict[str, Member] = {}
        self._callees: dict[Any, str] = {}
        """Calls in flight → who was called, in the order in which they were made."""
        self.roll = Roll(self._members)
        self._looked = -LOOK
        self._places = Places(self._members, deadlines)
        self._publication: tuple[str, Load] | None = None
        self._warm_up: WarmUp | None = None
        self._chained = False
        self._wanted = -WANTED
        self._second_tries: set[str] = set()
        """Who took the place of somebody that was lost in its start."""

    def open(self, name: str) -> None:
        """Add a worker: it waits for a place, starts, attests, then loads the present revision."""
        member = Member(name, self._spawn(name), opened=time.monotonic())
        self._members[name] = member
        self._call(member, member.handle.__ray_call__.remote(capacity.node_of), "place", math.inf)
        self._call(member, member.handle.start.remote(), "start", math.inf)  # until it has a place

    def drain(self, name: str) -> None:
        """Have a worker finish what it holds, for its run or its borrower, and leave; nobody takes its place."""
        member = self._members[name]
        if member.state is State.LENT:
            self.take_back(name)
        member.state = advance(member.state, "leave")

    def move(self, nodes: Collection[str]) -> list[tuple[str, str]]:
        """Have workers leave nodes that are about to go; returns their names and those who take their place."""
        leaving = [n for n, m in self._members.items() if m.node in nodes and m.state is not State.DRAINING]
        for name in leaving:
            self.drain(name)
            self.open(replacement_name(name))
        return [(name, replacement_name(name)) for name in leaving]

    def publish(self, name: str, load: Load, *, warm_up: WarmUp | None = None, chained: bool = False) -> None:
        """Have everybody load the weights called `name` after the units they hold.

        The call and its payload travel while those units are still at work, so that nobody waits for them.

        Args:
            warm_up: for those who still start, and compile before they load anything.
            chained: what is sent builds on the revision before; who never held one is sent the whole.
        """
        self._publication = (name, load)
        self._warm_up = warm_up
        self._chained = chained
        for member in self._members.values():
            member.state = advance(member.state, "outdated")
            member.idle_since = time.monotonic()
            if member.cold:
                member.cold, shapes = 0, member.cold
                self._warm(member, shapes)
                if not member.count("warm-up"):
                    self._enter(member)
            elif member.state is State.STALE:
                self._load(member, full=chained and not member.proved)

    def renew(self) -> None:
        """Have everybody leave at once and others take their places, who start as they are made now.

        Between iterations, when no unit is at work; no replacement is spent for it.
        """
        self._publication = None
        for name, member in list(self._members.items()):
            self._remove(name)
            if member.state is not State.DRAINING:
                self.open(replacement_name(name))

    def release_gpu_cache(self) -> None:
        """Have everybody who has started give back cached GPU memory, after the units they hold."""
        for member in self._members.values():
            if member.state not in (State.WAITING, State.STARTING):
                seconds = self._deadlines.release_gpu_cache + self._unit_seconds * member.units + member.loading()
                self._call(member, member.handle.release_gpu_cache.remote(), "release_gpu_cache", seconds)

    @property
    def resting(self) -> bool:
        """Whether somebody has not answered `release_gpu_cache` yet."""
        return any(
            call.kind == "release_gpu_cache" for member in self._members.values() for call in member.calls.values()
        )

    def lend(self, worker: str, loan: int) -> None:
        """Give a worker that is ready away, after the units it holds; until `take_back` it gets none."""
        member = self._members[worker]
        member.state = advance(member.state, "lent")
        # At most one call of its borrower's: loading what is evaluated, and rewards, or a unit.
        member.guest = max(self._deadlines.start + self._deadlines.publish, self._unit_seconds)
        seconds = self._deadlines.publish + self._unit_seconds * member.units
        self._call(member, member.handle.lend.remote(loan), "lend", seconds)

    def take_back(self, worker: str) -> None:
        """End a worker's loan: after what it does for its borrower it loads the present revision."""
        member = self._members[worker]
        member.state = advance(member.state, "returned")
        member.idle_since = time.monotonic()
        if member.state is State.STALE:
            self._load(member, full=False)

    def ping(self) -> None:
        """Have those who have nothing to do say that they are there: a death is noticed before there is work."""
        for name, member in self._members.items():
            if not member.calls and member.state in (State.STARTING, State.STALE, State.READY):
                self._call(member, member.handle.__ray_call__.remote(present, name), "ping", self._deadlines.fetch)

    def names(self) -> list[str]:
        return list(self._members)

    def ready(self) -> list[str]:
        """Names of workers that hold the present revision, least busy first."""
        ready = [(member.units, name) for name, member in self._members.items() if member.state is State.READY]
        return [name for _, name in sorted(ready)]

    @property
    def busy(self) -> bool:
        """Whether there is work: units at work, or free slots were asked for a moment ago."""
        return any(member.units for member in self._members.values()) or time.monotonic() - self._wanted < WANTED

    def slots(self, max_inflight: int | None = None) -> list[str]:
        """Names of workers that may take a unit, one entry per free slot, least busy first.

        Args:
            max_inflight: units that a worker may have, if not all that the pool allows.
        """
        self._wanted = time.monotonic()
        free = [
            (taken, name)
            for name, member in self._members.items()
            if member.state is State.READY
            for taken in range(member.units, max_inflight or self._max_inflight)
        ]
        return [name for _, name in sorted(free)]

    def give(self, worker: str, unit: WorkUnit, method: str, *arguments: Any, parts: int = 1) -> None:
        """Send a unit: call `method` on the worker; with 2 `parts` it returns a small and a large one."""
        member = self._members[worker]
        refs = send(member.handle, role_of(worker), method, *arguments, parts=parts)
        small, large = refs if parts == 2 else (refs, None)
        seconds = self._unit_seconds * (member.units + 1)
        if not member.units:
            member.turn_since = time.monotonic()
        self._call(member, small, "unit", seconds, unit=unit, large=large)

    def held(self) -> list[tuple[str, WorkUnit]]:
        """Worker and unit of everything at work."""
        return [(name, unit) for name, member in self._members.items() for unit in member.held]

    def refs(self) -> list[Any]:
        """References of all calls in flight."""
        return list(self._callees)

    @property
    def awaited(self) -> bool:
        """Whether an answer is to come that is more than a word of somebody idle."""
        return any(call.kind != "ping" for member in self._members.values() for call in member.calls.values())

    def settle(self, ready: set[Any]) -> list[Event]:
        """What the `ready` references and, now and then, passed deadlines mean. Raises the workers' own errors."""
        events: list[Event] = []
        answered = [ref for ref in self._callees if ref in ready] if ready else []
        # Large second parts stay where they are; only the small answers are brought here.
        values = wait.get_together(answered, seconds=self._deadlines.fetch)
        for ref in answered:
            name = self._callees.get(ref)  # None: its worker was lost a moment ago
            event = self._settle(name, self._members[name], ref, values) if name is not None else None
            events += [] if event is None else [event]
        events += self._gone()
        now = time.monotonic()
        if now - self._looked >= LOOK:
            self._looked = now
            events += self._overdue(now) + self._places.late(now)
        return events

    def _overdue(self, now: float) -> list[Event]:
        """Whose answers are late is lost."""
        events: list[Event] = []
        for name, member in list(self._members.items()):
            call = next((call for call in member.calls.values() if now > call.deadline), None)
            if call is not None:
                what = call.unit.id if call.unit else call.kind
                events.append(self._lost(name, member, f"{what} passed its deadline of {call.seconds:g} s"))
        return events

    def _gone(self) -> list[Event]:
        """Who was to leave, and has nothing left to finish."""
        gone = [name for name, m in self._members.items() if m.state is State.DRAINING and not m.holds]
        for name in gone:
            self._remove(name)
        return [Left(name) for name in gone]

    def retire(self, worker: str, reason: str) -> Lost | None:
        """Replace a worker that is not to be trusted; None if it is no member any more."""
        member = self._members.get(worker)
        return None if member is None else self._lose(worker, member, reason)

    def has_proved(self, but: str) -> bool:
        """Whether somebody other than `but` has held a revision and stays."""
        return any(m.proved and m.state is not State.DRAINING for name, m in self._members.items() if name != but)

    def dismiss(self, worker: str, reason: str) -> Unfit | Lost:
        """End a worker that cannot work with the others; nobody takes its place."""
        member = self._members[worker]
        if member.state is State.DRAINING:
            return self._lose(worker, member, reason)
        member.state = advance(member.state, "lost")
        self._remove(worker)
        return Unfit(worker, reason)

    @property
    def leaving(self) -> bool:
        """Whether somebody is to leave and has not yet."""
        return any(member.state is State.DRAINING for member in self._members.values())

    def _call(self, member: Member, ref: Any, kind: str, seconds: float, **details: Any) -> None:
        member.add(ref, Call(kind=kind, deadline=time.monotonic() + seconds, seconds=seconds, **details))
        self._callees[ref] = member.name

    def _remove(self, name: str) -> None:
        """End a member, and forget its calls."""
        member = self._members.pop(name)
        for ref in member.calls:
            self._callees.pop(ref, None)
        ray.kill(member.handle, no_restart=True)

    def _warm(self, member: Member, shapes: int) -> None:
        """Have a worker compile, with a call for each shape, whose answers show how far it is."""
        if self._warm_up is not None:
            member.warm_ups = shapes
            for shape in range(shapes):
                seconds = self._deadlines.warm_up * (shape + 1)
                self._call(member, self._warm_up(member.handle, shape), "warm-up", seconds)
        elif self._publication is None:
            member.cold = shapes  # until `publish`

    def _enter(self, member: Member) -> None:
        """A worker has started: all that it lacks is the present revision."""
        member.state = advance(member.state, "started")
        member.idle_since = time.monotonic()
        if member.state is State.STALE:
            self._load(member, full=self._chained)

    def _load(self, member: Member, *, full: bool) -> None:
        if self._publication is not None:
            name, load = self._publication
            seconds = self._deadlines.publish + self._unit_seconds * member.units + member.loading() + member.guest
            self._call(member, load(member.handle, full), "load", seconds, publication=name)

    def _settle(self, name: str, member: Member, ref: Any, values: Mapping[Any, Any]) -> Event | None:
        """What the answer `ref` means; its value, if it is among `values`, need not be fetched any more."""
        del self._callees[ref]
        call = member.take(ref)
        what = f"{call.unit.id if call.unit else call.kind} on {name}"
        try:
            value = values[ref] if ref in values else wait.get(ref, what=what, seconds=self._deadlines.fetch)
        except (UserError, RunError) as error:
            return self._failed(name, member, call, error)
        if call.unit is not None:
            # If it is outdated, it waits from now on; else this is its next unit's turn.
            member.idle_since = member.turn_since = time.monotonic()
            return Done(name, call.unit, value, call.large)
        if call.kind in ("start", "warm-up"):
            if call.kind == "start":
                member.tier = value.tier
                self._warm(member, value.warm_ups)
            left = member.count("warm-up")
            if not left and not member.cold:
                self._enter(member)
            return Started(name, value) if call.kind == "start" else Warmed(name, left)
        return None if call.kind == "ping" else self._settled(name, member, call, value)

    def _failed(self, name: str, member: Member, call: Call, error: UserError | RunError) -> Event:
        """What an error means; raises it if it is the run's."""
        if isinstance(error, wait.Gone):
            # A worker that cannot be given its inputs is replaced as well: the budget bounds the attempts.
            return self._lost(name, member, error.reason)
        if isinstance(error, Leaving):
            return self._lose(name, member, str(error), spend=False)
        if call.unit is not None and isinstance(error, NonsenseError):
            member.idle_since = member.turn_since = time.monotonic()
            return Nonsense(name, call.unit, str(error))
        if call.kind in ("start", "warm-up") and self.has_proved(name):
            return self.dismiss(name, str(error))
        if member.guest:
            return self._lose(name, member, str(error))
        raise error

    def _settled(self, name: str, member: Member, call: Call, value: Any) -> Event | None:
        """What an answer means that is neither to a unit nor of a worker that starts."""
        if call.kind == "place":
            member.node = value
            member.state = advance(member.state, "placed")
            for start in member.calls.values():
                start.seconds = self._deadlines.start
                start.deadline = time.monotonic() + start.seconds
            return None
        if call.kind == "load":
            latest = self._publication is not None and self._publication[0] == call.publication
            if isinstance(value, Refusal):
                if latest:
                    self._load(member, full=True)
                return Refused(name, value.reason)
            member.proved, member.guest = True, 0.0
            if latest and member.state is State.STALE:
                member.state = advance(member.state, "proved")
            return Loaded(name, value, waited=time.monotonic() - member.idle_since)
        return Lent(name) if call.kind == "lend" else Rested(name, value)

    def _lost(self, name: str, member: Member, reason: str) -> Lost | Unfit:
        """As `_lose`; but while others are at work, who is lost in its start as the one before it is not replaced."""
        if member.state in (State.WAITING, State.STARTING):
            if name in self._second_tries and self.has_proved(name):
                return self.dismiss(name, reason)
            self._second_tries.add(replacement_name(name))
        return self._lose(name, member, reason)

    def _lose(self, name: str, member: Member, reason: str, *, spend: bool = True) -> Lost:
        """`spend`: whether it is a failure of this run's, which the budget bounds."""
        leaving = member.state is State.DRAINING
        member.state = advance(member.state, "lost")
        self._remove(name)
        if leaving:
            return Lost(name, reason, "")
        if member.guest:
            reason += ", while it was lent"
        elif spend:
            self._budget.spend(name, reason)
        replacement = replacement_name(name)
        self.open(replacement)
        return Lost(name, reason, replacement)
