"""A pool: workers of one role that compute the same bits for a unit. It replaces lost workers, grows and shrinks.

::

    lost ──► replaced, charged to `fleet.max_replacements`   it crashed, hung, or gave too many wrong answers
         ──► replaced, not charged                           SIGTERM; its node is draining; the network was cut
         ──► removed; the pool shrinks by one                it cannot start, or its score class differs
         ──► the run ends                                    the same, and no other worker of the pool works
    no resources ──► it waits; the run ends if the whole pool had none during the deadline
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from actors.dispatch.unit_router import UnitRouter
from actors.fleet.worker import Observer, Weights, Worker
from actors.world import Tasks, World, first_error
from solrl_ray.config.fleet import Deadlines
from solrl_ray.errors import Gone, Late, Leaving, RunError, Unreachable, UserError, WorkerGone
from solrl_ray.scheduling.worker_state import Replacements, State, advance, leavers, replacement_name, worker_name

_STARTING = (State.WAITING, State.STARTING)


class Pool:
    def __init__(
        self,
        name: str,
        spawn: Callable[[str], Any],
        *,
        unit_seconds: float,
        world: World,
        tasks: Tasks,
        router: UnitRouter,
        deadlines: Deadlines,
        replacements: Replacements,
        observer: Observer,
    ) -> None:
        """
        Args:
            name: name of the pool, as in `config.pools`.
            spawn: creates the actor with a given name, without waiting for it.
            unit_seconds: deadline of one unit.
        """
        self.name = name
        self.workers: dict[str, Worker] = {}
        """Live workers, by name."""
        self.weights: Weights | None = None
        self._spawn, self._unit_seconds = spawn, unit_seconds
        self._world, self._tasks, self._router, self._deadlines = world, tasks, router, deadlines
        self._replacements, self._observer = replacements, observer
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ended: dict[str, BaseException | None] = {}
        """Workers that the pool has ended → the reason; None if they had only to leave."""
        self._retried_starts: set[str] = set()
        """Names of replacements for workers that were lost while starting."""
        self._next_slot = 0
        self._reported_unplaced: set[str] = set()
        """Workers already reported as waiting for resources."""
        self._vacated = -math.inf
        """Time at which a placed worker last ended."""

    # Membership

    def resize(self, count: int) -> list[str]:
        """Set the number of workers, not counting draining ones; returns the names of those that now drain."""
        states = {worker.name: worker.state for worker in self._staying()}
        for _ in range(count - len(states)):
            self._open(worker_name(self.name, self._next_slot))
            self._next_slot += 1
        on_cards = {worker.name for worker in self._staying() if worker.process.name}
        leaving = leavers(states, len(states) - count, on_cards)
        for name in leaving:
            self._drain(self.workers[name])
        return leaving

    def leave_nodes(self, nodes: Collection[str]) -> list[tuple[str, str]]:
        """Drain the workers on these nodes and start their replacements; returns (worker, replacement) names."""
        # Roles on a shared GPU move together with its learner rank.
        leaving = [worker for worker in self._staying() if worker.node in nodes and not worker.process.name]
        for worker in leaving:
            self._drain(worker)
            self._open(replacement_name(worker.name))
        return [(worker.name, replacement_name(worker.name)) for worker in leaving]

    def retire(self, worker: str, reason: str) -> None:
        """Replace a worker whose answers cannot be trusted; does nothing if it is gone."""
        if worker in self.workers:
            self._end(self.workers[worker], WorkerGone(worker, reason))

    def publish(self, weights: Weights) -> None:
        """Make all workers load these weights, after the units that they already have."""
        self.weights = weights
        for worker in self.workers.values():
            worker.outdated()

    def _staying(self) -> list[Worker]:
        """Workers that are not leaving. A worker that is being replaced is represented by its successor only."""
        live = self.workers.values()
        return [w for w in live if w.state is not State.DRAINING and self._ended.get(w.name, w) is not None]

    # State

    @property
    def at_work(self) -> int:
        """Number of workers that are placed and not draining."""
        return sum(worker.state not in (State.WAITING, State.DRAINING) for worker in self.workers.values())

    def census(self) -> dict[str, int]:
        """State → number of workers, for every state except dead."""
        counts = {state.value: 0 for state in State}
        for worker in self.workers.values():
            counts[worker.state.value] += 1
        del counts[State.DEAD.value]
        return counts

    def tiers(self) -> dict[str, int]:
        """Precision tier → number of workers that attested it."""
        return dict(Counter(worker.tier for worker in self.workers.values() if worker.tier))

    def warmed(self) -> tuple[int, int]:
        """Numbers of forward shapes compiled so far and in total, over all workers; (0, 0) without compilation."""
        workers = self.workers.values()
        return sum(worker.warmed for worker in workers), sum(worker.warm_ups for worker in workers)

    # Start and end of workers

    def _open(self, name: str) -> None:
        if self._tasks.over:
            return
        worker = Worker(
            name,
            self.name,
            self._spawn(name),
            world=self._world,
            deadlines=self._deadlines,
            unit_seconds=self._unit_seconds,
            weights=lambda: self.weights,
            alone=lambda: self.at_work <= 1,
            unplaced=self._on_unplaced,
            observer=self._observer,
            router=self._router,
        )
        self.workers[name] = worker
        task = self._running[name] = self._tasks.start(self._run_worker(worker), f"the work of {name}")
        task.add_done_callback(lambda _: self._on_task_done(worker))

    def _on_task_done(self, worker: Worker) -> None:
        """Clean up if the worker's task was cancelled before it began, for example at the end of the run: such a task
        does not clean up itself.
        """
        if self.workers.pop(worker.name, None) is not None:
            self._world.dismiss(worker.actor)

    def _drain(self, worker: Worker) -> None:
        worker.leave()
        if not worker.units:  # it has nothing to finish
            self._end(worker, None)

    def _end(self, worker: Worker, error: BaseException | None) -> None:
        self._ended[worker.name] = error
        # Not at once: a task that has not begun would not run its cleanup.
        asyncio.get_running_loop().call_soon(self._running[worker.name].cancel)

    async def _run_worker(self, worker: Worker) -> None:
        error: BaseException | None = None
        try:
            await worker.live()
        except asyncio.CancelledError:
            if worker.name not in self._ended:
                raise  # the run ends
            error = self._ended.pop(worker.name)
        except BaseException as raised:
            error = first_error(raised)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            end = self._world.kill if isinstance(error, Gone | Leaving) else self._world.dismiss
            end(worker.actor)
            self._running.pop(worker.name, None)
            self.workers.pop(worker.name, None)
            self._reported_unplaced.discard(worker.name)
            if worker.node:
                self._vacated = self._world.now()
            self._report_exit(worker, error, requeued=self._router.lost(worker.name))

    def _on_unplaced(self, worker: Worker, seconds: float, since: float | None) -> None:
        """Handle a worker that has waited `seconds` for resources.

        `since`: start of the deadline if it has passed, else None. Raises RunError if it has passed and no worker of
        the pool was placed in that time.
        """
        if since is not None and self._vacated <= since and not any(each.node for each in self.workers.values()):
            raise RunError(
                f"{', '.join(self.workers)} found no room in the cluster within {seconds:g} s "
                "(fleet.deadlines.resources and .start), and no other worker of the pool is left; add nodes, request "
                "less, or raise fleet.deadlines.start if the machine is slow"
            )
        if worker.name not in self._reported_unplaced and (self.at_work or since is not None):
            self._reported_unplaced.add(worker.name)
            self._observer.unplaced(worker.name, seconds, self.at_work)

    def _report_exit(self, worker: Worker, error: BaseException | None, requeued: int) -> None:
        """Report the end of a worker, and replace it where needed. Raises the error if it ends the run.

        `requeued`: number of its units that go to other workers.
        """
        name, starting, leaving = worker.name, worker.state in _STARTING, worker.state is State.DRAINING
        if worker.state is not State.DEAD:
            worker.state = advance(worker.state, "lost")
        if error is None:
            if leaving:
                self._observer.left(name)
            return
        reason, replacement = _reason(error, name), replacement_name(name)
        process = worker.process
        own = isinstance(error, RunError | UserError) and not isinstance(error, Gone | Leaving)
        hopeless = starting and (own or (isinstance(error, Gone) and name in self._retried_starts))
        if leaving:
            self._observer.lost(name, reason, "", requeued, process)
        elif hopeless and any(w.proved and w.state is not State.DRAINING for w in self.workers.values()):
            self._observer.unfit(name, reason)
        elif isinstance(error, Gone | Leaving):
            counted, process.counted = process.counted, bool(process.name)
            if isinstance(error, Gone) and not counted:
                # Only if it was reachable before: replacing a node that is never reachable must use up the budget.
                was_cut = isinstance(error, Unreachable) and worker.proved
                if not (was_cut and self._replacements.excuse()):
                    self._replacements.spend(process.name or name, reason)
            if starting:
                self._retried_starts.add(replacement)
            self._open(replacement)
            self._observer.lost(name, reason, replacement, requeued, process)
        else:
            raise error


def _reason(error: BaseException, worker: str) -> str:
    """Why a worker is gone, without its name, as part of a sentence that already names it."""
    if isinstance(error, Late):
        return f"{error.what.removesuffix(f' on {worker}')} passed its deadline of {error.seconds:g} s"
    return error.reason if isinstance(error, Gone) else str(error)
