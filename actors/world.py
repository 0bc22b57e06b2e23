"""The controller's interface to its runtime: actors and their answers, a clock, threads for blocking work, nodes.

`actors.ray_world` implements it with Ray. Controller, fleet, dispatching, learner group and evaluations use only this
interface, so tests can replace Ray with a simulation.
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
"""Seconds to wait for the other calls of a group after one has failed: a peer may notice a lost process before Ray."""

NOTICED = 5.0
"""Seconds within which Ray reports the death of a process. Its peers may notice it earlier."""


def _is_set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False, slots=True)
class Process:
    """An operating system process that runs calls one after another.

    It belongs to one actor, or to all roles that share a GPU. Those roles are lost together.
    """

    name: str = ""
    """``card-0`` if several roles share it; empty for a process with one role."""
    roles: list[str] = field(default_factory=list)
    """Names of the live roles on a shared GPU."""
    lost: bool = False
    """True if the process has ended or is about to end."""
    counted: bool = False
    """True if its loss has already been charged to the replacement budget, or must not be charged."""
    told: bool = False
    """True if its loss has been reported to the user."""
    learner_is_idle: asyncio.Event = field(default_factory=_is_set)
    """Cleared while the learner rank of this process joins a rebuilt group and repeats the update. Meanwhile the other
    roles neither start nor compile.
    """
    _ahead: dict[object, float] = field(default_factory=dict)
    """Awaited calls → their deadlines in seconds."""

    @property
    def learns(self) -> bool:
        """True if one of its roles is a learner rank."""
        return any(role.startswith("learner-") for role in self.roles)

    @contextmanager
    def waited_for(self, seconds: float | None) -> Iterator[float | None]:
        """Context of a wait for one call that may take `seconds`.

        Yields the deadline in seconds, which includes the deadlines of the calls ahead in this process.
        """
        call = object()
        deadline = None if seconds is None else seconds + sum(self._ahead.values())
        self._ahead[call] = seconds or 0.0
        try:
            yield deadline
        finally:
            del self._ahead[call]


@dataclass(frozen=True, slots=True)
class Sent:
    """A call that was sent to an actor."""

    answer: Any
    """Handle that `World.answer` awaits."""
    large: Any = None
    """Reference to the second of two parts of the answer, which stays on the node that made it."""
    process: Process = field(default_factory=Process)
    """The process that runs the call."""


class Exporter(Protocol):
    """Exports metrics by name: sets gauges, increases counters, adds observations to histograms."""

    def set(self, name: str, value: float, **tags: str) -> None: ...

    def add(self, name: str, value: float, **tags: str) -> None: ...

    def observe(self, name: str, value: float, **tags: str) -> None: ...


class MetricsWriter(Protocol):
    """Writes metrics records as they arrive; `solrl_ray.report.trackers.TrackerWriter` implements it."""

    def iteration(self, metrics: IterationMetrics) -> None: ...

    def evaluation(self, metrics: EvaluationMetrics, pictures: list[list[torch.Tensor]]) -> None: ...

    def close(self) -> None: ...


class Tell(Protocol):
    """Reports a sentence to the user as an event; `actors.monitoring.telemetry.Telemetry.message` implements it."""

    def __call__(self, text: str, kind: EventKind = "note") -> None: ...


class World(Protocol):
    """The controller's runtime. Files are not part of it: `solrl_ray.common.files` accesses the run folder directly."""

    # The clock

    def now(self) -> float:
        """Seconds of a monotonic clock."""

    # Actors. These methods return the new actor at once; its `start` is a separate call.

    def text_encoder(self, name: str) -> Any: ...

    def selector(self, name: str) -> Any: ...

    def explorer(self, name: str) -> Any: ...

    def regenerator(self, name: str) -> Any: ...

    def learner(self, rank: int, rebuilt: int) -> Any:
        """`rebuilt`: how often the group was rebuilt; becomes part of the actor's name."""

    def process(self, actor: Any) -> Process:
        """The process that an actor runs in."""

    def reserve_learner_bundles(self, seconds: float) -> bool:
        """Reserve resources for all ranks at once; returns True if they were available within `seconds`. Blocks."""

    def kill(self, actor: Any) -> None:
        """Kill an actor's process, with all roles that share it."""

    def dismiss(self, actor: Any) -> None:
        """End an actor; other roles that share its GPU stay."""

    def abort(self, rank: Any) -> None:
        """Make a learner rank on a shared GPU leave the collective that it waits in, at once.

        Does nothing for a rank that is alone in its process: that process is killed instead.
        """

    # Calls

    def send(self, actor: Any, method: str, *arguments: Any, parts: int = 1) -> Sent:
        """Call a method of an actor, without waiting. An actor runs its calls in the order in which they were sent.

        Args:
            arguments: values, or references from `put` or from another call.
            parts: number of parts in the answer; if 2, the second one stays on the node that made it.
        """

    async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
        """The answer to a call; if the answer has two parts, the first one.

        Args:
            what: name of the wait, as the subject of a sentence in error messages.
            seconds: deadline, counted from the end of the calls ahead in this process. None: no deadline, because the
                caller has one.

        Raises:
            WorkerGone: the deadline passed, or the actor died.
            InputGone: an argument of the call is lost.
            UserError, RunError: raised by the method. Any other error becomes a RunError that names its class.
        """

    def put(self, value: Any) -> Any:
        """A reference to `value`, which is stored once per node."""

    # Output

    def exporter(self, run: str) -> Exporter:
        """An exporter for the metrics of `solrl_ray.metrics.instruments`."""

    def metrics_writers(self, folder: Path, first_iteration: int) -> list[MetricsWriter]:
        """Writers for curves and images of a run that continues with iteration `first_iteration`. Blocks."""

    def tracker(self, name: str, config: Config, folder: Path) -> MetricsWriter:
        """The writer for one of `tracking.trackers`, for the run in `folder`. Blocks."""

    def write_report(self, folder: Path) -> None:
        """Write the report page of a run folder. Blocks."""

    # Blocking work

    async def blocking(self, work: Callable[[], T], what: str, seconds: float) -> T:
        """Run `work` in a thread and return its result; it may block, for example on files.

        Raises RunError after `seconds`, which names the work by `what`. The thread is then abandoned.
        """

    def draining_nodes(self) -> frozenset[str]:
        """Ids of the nodes that are draining. Blocks."""

    def survey(self, config: Config) -> list[str]:
        """Actors that the cluster cannot place now, by kind: ``2 of fleet.explorers``. Blocks."""

    @property
    def node(self) -> str:
        """Id of the controller's node."""


def first_error(error: BaseException) -> BaseException:
    """The first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class OnDisk(Protocol):
    """`on_disk` with the world, configuration and folder of one run filled in."""

    async def __call__(self, work: Callable[[], T], what: str) -> T: ...


async def on_disk(world: World, config: Config, folder: Path, work: Callable[[], T], what: str) -> T:
    """Run `work`, which reads or writes the run folder, and return its result.

    `what` names the work in errors. Raises as `World.blocking`.
    """
    named = f"{what} in {folder} (fleet.deadlines.checkpoint)"
    with naming(folder):
        return await world.blocking(work, named, config.fleet.deadlines.checkpoint)


class Tasks:
    """The named tasks of a run. The first error in any task cancels all others and is raised by the `async with` block.

    >>> async def run() -> None:
    ...     async with Tasks() as tasks:
    ...         tasks.start(asyncio.sleep(3600.0), "a long wait")  # cancelled at the end of the block
    >>> asyncio.run(run())
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()
        self.over = False
        """True once the run is ending: no new task may start."""

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
        """Start a coroutine as a named task. Raises CancelledError if the run is ending."""
        if self.over:
            work.close()
            raise asyncio.CancelledError(f"the run ends before {name}")
        task = self._group.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self.over = self.over or (not task.cancelled() and task.exception() is not None)


async def all_answers(
    world: World, calls: Sequence[Sent], *, what: str, seconds: float, on_loss: Callable[[], None] = lambda: None
) -> list[Any]:
    """The answers to calls that depend on each other: if one process is lost, the other calls fail or hang.

    `on_loss` is called when a loss is noticed; the other calls then get `GRACE` seconds to end.

    Raises as `World.answer`. A lost process takes precedence over the failures that it caused: after a failed call,
    this waits up to `GRACE` seconds for a loss, and PeerGone counts as a loss. Lost processes, and those that hang
    even then, are marked as lost.
    """
    waits = [asyncio.ensure_future(world.answer(call, what=what, seconds=seconds)) for call in calls]
    pending, failure = set(waits), None
    try:
        while pending:
            timeout = None if failure is None else GRACE
            done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for wait in done if (error := wait.exception()) is not None]
            if lost := [error for error in errors if isinstance(error, WorkerGone | PeerGone)]:
                on_loss()
                if pending and not any(isinstance(error, WorkerGone) for error in lost):
                    await asyncio.wait(pending, timeout=NOTICED)  # until Ray reports why the peer is gone
                await _mark_lost(calls, waits)
                gone = (found for found in [*lost, *map(_error, waits)] if isinstance(found, WorkerGone))
                raise next(gone, WorkerGone(what, str(lost[0])))
            failure = failure or next(iter(errors), None)
            if not done:
                break
    finally:
        for wait in pending:
            wait.cancel()
    if failure is not None:
        raise failure
    return [wait.result() for wait in waits]


async def _mark_lost(calls: Sequence[Sent], waits: Sequence[asyncio.Future[Any]]) -> None:
    """Mark as lost the processes that are gone, or do not answer within `GRACE` seconds after another one was lost.

    A process that other roles share is kept if it answers, even with an error.
    """
    pending = [wait for wait, call in zip(waits, calls, strict=True) if not wait.done() and call.process.name]
    if pending:
        await asyncio.wait(pending, timeout=GRACE)
    for wait, call in zip(waits, calls, strict=True):
        call.process.lost = call.process.lost or isinstance(_error(wait), WorkerGone) or not wait.done()


def _error(answer: asyncio.Future[Any]) -> BaseException | None:
    return answer.exception() if answer.done() and not answer.cancelled() else None
