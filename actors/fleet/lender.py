"""Lending regenerators of a live run: borrowers ask in threads of their own, the controller's main thread acts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from actors.fleet.pool import Pool
from solrl_ray.config.schema import Config
from solrl_ray.scheduling.lending import Lend, Lending, Loan, TakeBack
from solrl_ray.scheduling.worker_state import State


class Lender:
    """`ask`, `renew` and `done` may be called from any thread, all else from the one that looks after the pools."""

    def __init__(self, config: Config, tell: Callable[[str], None]) -> None:
        """`tell` is given a sentence for the user."""
        self._tell = tell
        self._lending = Lending(config.evaluation.share, now=time.monotonic())
        # On a GPU that others compute on a regenerator's idle time is somebody's.
        self._shared = 0 < config.fleet.regenerators.num_gpus < 1
        self._lock = threading.Lock()
        self._closed = False
        self._told: set[str] = set()

    def ask(self, request: str) -> Loan | None:
        """See `Lending.ask`."""
        with self._lock:
            return self._lending.ask(request, time.monotonic())

    def renew(self, request: str) -> None:
        """See `Lending.renew`."""
        with self._lock:
            self._lending.renew(request, time.monotonic())

    def done(self, request: str) -> None:
        """See `Lending.done`."""
        with self._lock:
            self._lending.done(request)

    def tick(self, pool: Pool) -> None:
        """Lend a worker of the pool or take one back, if it is time to."""
        with self._lock:
            action = self._lending.tick(
                time.monotonic(),
                members=[name for name, state in pool.roll.lives().items() if state is not State.DRAINING],
                ready=pool.ready(),
                busy=self._shared or pool.busy,
                closed=self._closed,
            )
            borrower = self._lending.borrower
        if isinstance(action, Lend):
            pool.lend(action.loan.worker, action.loan.number)
            if borrower not in self._told:
                self._told.add(borrower)
                self._tell(f"{action.loan.worker} is the first to be lent to the evaluation {borrower}")
        elif isinstance(action, TakeBack):
            pool.take_back(action.loan.worker)

    def given(self) -> None:
        """The worker of the last loan knows of it."""
        with self._lock:
            self._lending.given()

    def close(self) -> None:
        """Lend nothing until `reopen`; what is lent is taken back by the next `tick`."""
        self._closed = True

    def reopen(self) -> None:
        self._closed = False

    @property
    def active(self) -> bool:
        """Whether `tick` may have something to do."""
        with self._lock:
            return self._lending.active

    @property
    def lent(self) -> bool:
        """Whether a worker is away, from being given until it is ready again."""
        with self._lock:
            return self._lending.borrower != ""
