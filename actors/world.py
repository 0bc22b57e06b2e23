"""The controller's interface to the outside: actors and their answers, a clock, threads for blocking work, nodes.

Ray's world is the real one (`actors.ray_world`). Controller, fleet, dispatching, learner group and evaluations use only
this interface, so that another world can replace Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from solrl_ray.common.files import naming
from solrl_ray.config.schema import Config
from solrl_ray.errors import PeerGone, WorkerGone
from solrl_ray.metrics.records import EvaluationMetrics, EventKind, IterationMetrics

T = TypeVar("T")

GRACE = 30.0
"""Seconds after a failed call of a group in which another may turn out to be lost: peers may notice that earlier."""

NOTICED = 5.0
"""Seconds in which Ray notices the death of a process, which its peers may notice earlier."""


def _is_set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False, slots=True)
class Process:
    """Does calls one after another: for an actor of its own, or for all roles of a card, which are lost together."""

    name: str = ""
    """``card-0``; empty for a process with one role."""
    roles: list[str] = field(default_factory=list)
    """Names of a card's living roles."""
    lost: bool = False
    """Whether it has ended, or is to end."""
    counted: bool = False
    """Whether its loss has used up a replacement, or need not."""
    told: bool = False
    """Whether the user knows of its loss."""
    learner_is_idle: asyncio.Event = field(default_factory=_is_set)
    """Not set while its learner rank joins a rebuilt group and repeats an update: others do not start or compile."""
    _ahead: dict[object, float] = field(default_factory=dict)
    """Calls that are waited for → their deadlines in seconds."""

    @property
    def learns(self) -> bool:
        """Whether a learner rank lives in it."""
        return any(role.startswith("learner-") for role in self.roles)

    @contextmanager
    def waited_for(self, seconds: float | None) -> Iterator[float | None]:
        """A block that waits for a call of up to `seconds`; yields its deadline, which counts the calls ahead of it."""
        call = object()
        deadline = None if seconds is None else seconds + sum(self._ahead.values())
        self._ahead[call] = seconds or 0.0
        try:
            yield deadline
        finally:
            del self._ahead[call]


@dataclass(frozen=True, slots=True)
class Sent:
    """A call on its way."""

    answer: Any
    """What `World.answer` waits for."""
    large: Any = None
    """Reference of the second of two parts, which stays where it was made."""
    process: Process = field(default_factory=Process)
    """Which does it."""


class Exporter(Protocol):
    """Sets, adds and observes metrics by name."""

    def set(self, name: str, value: float, **tags: str) -> None: ...

    def add(self, name: str, value: float, **tags: str) -> None: ...

    def observe(self, name: str, value: float, **tags: str) -> None: ...


class MetricsWriter(Protocol):
    """Writes records as they come; `solrl_ray.report.trackers.TrackerWriter` is one."""

    def iteration(self, metrics: IterationMetrics) -> None: ...

    def evaluation(self, metrics: EvaluationMetrics, pictures: list[list[torch.Tensor]]) -> None: ...

    def close(self) -> None: ...


class Tell(Protocol):
    """Gives the user a sentence, which becomes an event; `actors.monitoring.telemetry.Telemetry.message` is one."""

    def __call__(self, text: str, kind: EventKind = "note") -> None: ...


class World(Protocol):
    """Has no methods for files: the controller's run folder is on this world's disk (`solrl_ray.common.files`)."""

    # The clock

    def now(self) -> float:
        """Seconds of a monotonic clock."""

    # Actors. A method returns the new actor at once; starting it is a separate call.

    def text_encoder(self, name: str) -> Any: ...

    def selector(self, name: str) -> Any: ...

    def explorer(self, name: str) -> Any: ...

    def regenerator(self, name: str) -> Any: ...

    def learner(self, rank: int, rebuilt: int) -> Any:
        """`rebuilt`: how often the group was rebuilt, as part of the name."""

    def process(self, actor: Any) -> Process:
        """In which an actor lives."""

    def reserve_learner_bundles(self, seconds: float) -> bool:
        """Reserve places for all ranks at once; whether there was room within `seconds`. Blocks."""

    def kill(self, actor: Any) -> None:
        """End an actor's process, and with it all roles of a card."""

    def dismiss(self, actor: Any) -> None:
        """End an actor; the other roles of its card stay."""

    def abort(self, rank: Any) -> None:
        """Have a learner rank on a card leave the collective in which it waits, at once. Does nothing for a rank with a
        process of its own, which is killed instead.
        """

    # Calls

    def send(self, actor: Any, method: str, *arguments: Any, parts: int = 1) -> Sent:
        """Call a method. An actor does its calls in the order sent.

        Args:
            arguments: values, and references from `put` or a call.
            parts: 2: the answer's second part stays where it is made.
        """

    async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
        """The answer to a call; its first part, if it has two.

        Args:
            what: the wait's name, as the subject of a sentence.
            seconds: the deadline, from when the process has done what is ahead; None: the caller has one.

        Raises:
            WorkerGone: the deadline passed, or the actor died.
            InputGone: an argument of the call is lost.
            UserError, RunError: raised by the method; another error becomes a RunError with its name.
        """

    def put(self, value: Any) -> Any:
        """A reference of `value`, which is stored once a node."""

    # Output

    def exporter(self, run: str) -> Exporter:
        """Of the metrics of `solrl_ray.metrics.instruments`."""

    def metrics_writers(self, folder: Path, first_iteration: int) -> list[MetricsWriter]:
        """Of curves and pictures, for a run that continues with `first_iteration`. Blocks."""

    def tracker(self, name: str, config: Config, folder: Path) -> MetricsWriter:
        """One of `tracking.trackers`, for the run in `folder`. Blocks."""

    def write_report(self, folder: Path) -> None:
        """Build the page of a run folder. Blocks."""

    # Blocking work

    async def blocking(self, work: Callable[[], T], what: str, seconds: float) -> T:
        """The result of `work`, which may block, for example on files.

        Raises RunError after `seconds`; the work is then abandoned, under its name `what`.
        """

    def draining_nodes(self) -> frozenset[str]:
        """Ids of nodes that are leaving. Blocks."""

    def survey(self, config: Config) -> list[str]:
        """For each kind of actor without room for all, part of a sentence: ``2 of fleet.explorers``. Blocks."""

    @property
    def node(self) -> str:
        """Id of the controller's node."""


def first_error(error: BaseException) -> BaseException:
    """The first error in a task group's nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class OnDisk(Protocol):
    """`on_disk` of one run."""

    async def __call__(self, work: Callable[[], T], what: str) -> T: ...


async def on_disk(world: World, config: Config, folder: Path, work: Callable[[], T], what: str) -> T:
    """The result of `work`, which reads or writes a run folder; `what` is its name. Raises as `World.blocking`."""
    named = f"{what} in {folder} (fleet.deadlines.checkpoint)"
    with naming(folder):
        return await world.blocking(work, named, config.fleet.deadlines.checkpoint)


class Tasks:
    """The named tasks of a run. The first error of any task ends all and is raised where they were opened.

    >>> async def run() -> None:
    ...     async with Tasks() as tasks:
    ...         tasks.start(asyncio.sleep(3600.0), "a long wait")  # is cancelled at the end of the block
    >>> asyncio.run(run())
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()
        self.over = False
        """Whether the run is ending: no task may start."""

    async def __aenter__(self) -> Tasks:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.over = True
        for task in list(self._running):
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    def start(self, work: Any, name: str) -> asyncio.Task[Any]:
        """Start a coroutine beside the run. Raises CancelledError if the run is ending."""
        if self.over:
            work.close()
            raise asyncio.CancelledError(f"the run ends before {name}")
        task = self._group.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self.over = self.over or (not task.cancelled() and task.exception() is not None)


async def all_answers(
    world: World, calls: Sequence[Sent], *, what: str, seconds: float, on_loss: Callable[[], None] = lambda: None
) -> list[Any]:
    """The answers to interdependent calls: if one is lost, the others fail or hang.

    `on_loss`: called at a loss, before the other calls get `GRACE` seconds to end.

    Raises as `World.answer`, preferring a loss over the failures that it caused: a failed call is held back for `GRACE`
    seconds, and PeerGone becomes a loss. Processes that are lost then, and those that hang because of it, are marked.
    """
    waits = [asyncio.ensure_future(world.answer(call, what=what, seconds=seconds)) for call in calls]
    pending, failure = set(waits), None
    try:
        while pending:
            timeout = None if failure is None else GRACE
            done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for each in done if (error := each.exception()) is not None]
            if lost := [error for error in errors if isinstance(error, WorkerGone | PeerGone)]:
                on_loss()
                if pending and not any(isinstance(error, WorkerGone) for error in lost):
                    await asyncio.wait(pending, timeout=NOTICED)  # until Ray says why the other one is gone
                await _mark_lost(calls, waits)
                gone = (found for found in [*lost, *map(_error, waits)] if isinstance(found, WorkerGone))
                raise next(gone, WorkerGone(what, str(lost[0])))
            failure = failure or next(iter(errors), None)
            if not done:
                break
    finally:
        for each in pending:
            each.cancel()
    if failure is not None:
        raise failure
    return [each.result() for each in waits]


async def _mark_lost(calls: Sequence[Sent], waits: Sequence[asyncio.Future[Any]]) -> None:
    """Mark the processes that are gone, or do not answer within `GRACE` seconds after another one was lost. A process
    with a card's other roles lives on if it answers, with whatever error.
    """
    pending = [each for each, call in zip(waits, calls, strict=True) if not each.done() and call.process.name]
    if pending:
        await asyncio.wait(pending, timeout=GRACE)
    for each, call in zip(waits, calls, strict=True):
        call.process.lost = call.process.lost or isinstance(_error(each), WorkerGone) or not each.done()


def _error(answer: asyncio.Future[Any]) -> BaseException | None:
    return answer.exception() if answer.done() and not answer.cancelled() else None
