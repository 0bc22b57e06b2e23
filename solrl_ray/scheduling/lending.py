"""When a live run lends a regenerator to an evaluation that somebody asks for, and when it wants it back; pure.

An account keeps `share`: every second earns `share` seconds for each regenerator, up to `SAVED`. A loan costs a second
a second while the run's regenerators have work, from the moment it is given until the worker holds the run's revision
again and is ready; while they have none it costs nothing, for nobody waits for it. A loan begins on a full account,
or when there is no work and no debt; it ends at a unit's end once the account is empty. What the last unit and the
loading take beyond that is a debt, which is earned back before the next loan: in the long run no more than the share
is taken.

::

    ask ─► GIVING ──given──► OUT ──refused, done or silent──► BACK ──ready again──► (none)

One worker is lent at a time, to one request at a time; others wait in the order in which they came. Whoever has a loan
asks before every unit whether it may go on, and renews the loan while its worker is at one; who is silent for
`PATIENCE` has ended, and is forgotten if it waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from solrl_ray.errors import RunError

SAVED = 30.0
"""Seconds that an account can hold: the longest that a loan lasts while there is work, but for its last unit."""
PATIENCE = 30.0
"""How long a request counts that says nothing, seconds."""
RENEW_SECONDS = 5.0
"""How often a loan is renewed."""


class LoanEnded(RunError):
    """The worker has been taken back: ask for another loan."""


@dataclass(frozen=True, slots=True)
class Loan:
    number: int
    """Names it to the worker: calls under another one are refused."""
    worker: str


@dataclass(frozen=True, slots=True)
class Lend:
    loan: Loan


@dataclass(frozen=True, slots=True)
class TakeBack:
    loan: Loan


class _Phase(Enum):
    GIVING = "giving"
    OUT = "out"
    ENDED = "ended"
    BACK = "back"


class Lending:
    def __init__(self, share: float, *, now: float) -> None:
        """
        Args:
            share: 0 to 1, of the time of all regenerators.
            now: the time; as in all calls, seconds of any clock that does not jump.
        """
        self._share = share
        self._ticked = now
        self._account = SAVED
        self._asked: dict[str, float] = {}
        """Request → when it asked last; in the order in which they came."""
        self._loan: Loan | None = None
        self._borrower = ""
        self._phase = _Phase.BACK
        self._empty = False
        self._loans = 0

    @property
    def account(self) -> float:
        """Seconds saved; below 0: debt."""
        return self._account

    @property
    def borrower(self) -> str:
        """The request that a worker is away for, until it is ready again; empty: none is away."""
        return self._borrower

    @property
    def active(self) -> bool:
        """Whether a worker is away or somebody waits for one."""
        return bool(self._borrower or self._asked)

    def ask(self, request: str, now: float) -> Loan | None:
        """The loan of a request, if it may go on with it or has just been given it; None: ask again later.

        None after a loan is also its end: the worker is taken back.
        """
        self._asked[request] = now
        if self._loan is None or request != self._borrower or self._phase is not _Phase.OUT:
            return None
        if self._empty:
            self._phase = _Phase.ENDED
            return None
        return self._loan

    def renew(self, request: str, now: float) -> None:
        """The request is at the unit that it asked for, or is loading; nothing if it is not known any more."""
        if request in self._asked:
            self._asked[request] = now

    def done(self, request: str) -> None:
        """The request wants nothing any more."""
        self._asked.pop(request, None)
        if request == self._borrower and self._phase is _Phase.OUT:
            self._phase = _Phase.ENDED

    def given(self) -> None:
        """The worker knows of the loan: from now on the borrower may call it."""
        if self._phase is _Phase.GIVING:
            self._phase = _Phase.OUT if self._borrower in self._asked else _Phase.ENDED

    def tick(
        self, now: float, *, members: Collection[str], ready: Sequence[str], busy: bool, closed: bool = False
    ) -> Lend | TakeBack | None:
        """What is to be done now; to be called often, and after each thing that happens to the workers.

        Args:
            members: all regenerators that stay, by name.
            ready: those that could be lent now, best first; a worker that was taken back is among them again.
            busy: whether there is work for them.
            closed: nothing is lent, and what is lent is wanted back.
        """
        self._keep_account(now, len(members), busy)
        self._asked = {request: asked for request, asked in self._asked.items() if now - asked <= PATIENCE}
        loan = self._loan
        if loan is None:
            return None if closed else self._begin(ready, busy)
        if loan.worker not in members or (self._phase is _Phase.BACK and loan.worker in ready):
            self._loan, self._borrower = None, ""
            return None
        if self._phase is _Phase.ENDED or (self._phase is _Phase.OUT and (closed or self._borrower not in self._asked)):
            self._phase = _Phase.BACK
            return TakeBack(loan)
        return None

    def _keep_account(self, now: float, members: int, busy: bool) -> None:
        passed, self._ticked = max(0.0, now - self._ticked), now
        spent = float(self._loan is not None and busy)
        self._account = min(SAVED, self._account + (self._share * members - spent) * passed)
        self._empty = busy and self._account <= 0

    def _begin(self, ready: Sequence[str], busy: bool) -> Lend | None:
        affordable = self._account >= SAVED if busy else self._account >= 0
        if not self._asked or not ready or not affordable or not self._share:
            return None
        self._loans += 1
        self._borrower = next(iter(self._asked))
        self._loan = Loan(number=self._loans, worker=ready[0])
        self._phase, self._empty = _Phase.GIVING, False
        return Lend(self._loan)
