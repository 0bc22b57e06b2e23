"""``solrl eval`` of a run that is live: on regenerators that it lends, one at a time, for its `evaluation.share`.

::

    checkpoint ─► merger (a CPU actor): a revision a policy
    controller ─► borrow ─► hold a policy's weights ─► score units ─► asked before each: go on? ─► back to the run
                            └──── renewed while the worker is at it ───┘

The addresses, the forwards' shape and the workers are those of an evaluation alone, and so are the scores' bytes within
one score class. What the run itself computes stays the same: a worker that comes back loads and proves the run's
revision before it gets work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.client import live_run
from actors.client.controller_actor import namespace
from actors.client.launch import located
from actors.cluster import wait
from actors.evaluation.finished_run import Merger, Request, merged, write
from actors.fleet.actor_factory import on_this_node
from actors.workers.regenerator import Evaluated
from actors.workers.termination import Leaving
from solrl_ray.config.continuation import stored
from solrl_ray.config.schema import Config, Learners
from solrl_ray.errors import RunError
from solrl_ray.evaluation.held_out import EVAL_POLICIES, evaluation_units
from solrl_ray.evaluation.request import obstacle
from solrl_ray.learning.state import LearnerState
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.records import Prompt, Receipt, WorkUnit
from solrl_ray.scheduling.lending import RENEW_SECONDS, LoanEnded
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publication import REGENERATOR, Publications
from solrl_ray.weight_sync.receipts import ReceiptBook

POLL = 0.5
"""How often a loan is asked for, seconds."""
SHOWN = 10.0
"""How often progress is told, seconds."""
ATTEMPTS = 3
"""Workers that may be lost under a unit before it is an error."""

Found = dict[str, dict[str, Evaluated]]
"""Policy → prompt id → scores."""


class RunEnded(Exception):
    """The run is not there any more, so it lends nothing."""


@dataclass(slots=True)
class _Held:
    """What the borrowed worker holds."""

    loan: int
    worker: str
    policy: str
    handle: Any


def page(config: Config, state: LearnerState, request: Request, *, address: str) -> Path | None:
    """Evaluate on what the run lends and write what was found; None, with a line that says why, if alone is better."""
    why_not = obstacle(config, stored(request.run))
    if why_not:
        print(f"note: {why_not}", flush=True)
        return None
    tell = partial(print, flush=True)
    found = evaluate(located(config), state, request, address=address, tell=tell)
    return None if found is None else write(config, request, state, found)


def evaluate(
    config: Config, state: LearnerState, request: Request, *, address: str, tell: Callable[[str], None]
) -> Found | None:
    """Evaluate on the live run of `request.run`, whose cluster is at `address`; None if it is not live, or ends.

    Args:
        tell: is given a sentence for the user.

    Raises:
        UserError, RunError: as an evaluation alone.
    """
    with live_run.joined(address):
        controller = live_run.controller_of(request.run)
        if controller is None:
            return None
        try:
            return _Borrower(config, state, request, controller, tell).run()
        except RunEnded:
            tell("the run has ended before the evaluation; going on alone")
            return None


class _Borrower:
    def __init__(
        self, config: Config, state: LearnerState, request: Request, controller: Any, tell: Callable[[str], None]
    ) -> None:
        self._config, self._state, self._request = config, state, request
        self._controller, self._tell = controller, tell
        self._name = namespace(request.out)
        self._prompts = {p.id: p for p in read_prompts(config.prompts.heldout)[: config.evaluation.prompts]}
        self._embeddings: dict[str, Any] = {}
        self._receipts = ReceiptBook()
        self._held: _Held | None = None
        self._shown = time.monotonic()
        self._waited = False

    def run(self) -> Found:
        self._encoder = self._actor("encoder")
        revisions = self._merged()
        payloads = {policy: self._payload(revision) for policy, revision in revisions.items()}
        found: Found = {policy: {} for policy in revisions}
        try:
            for policy in revisions:
                units = evaluation_units(
                    self._config,
                    list(self._prompts.values()),
                    updates=self._state.updates,
                    policy=EVAL_POLICIES[policy],
                )
                for unit in units:
                    found[policy][unit.prompt_id] = self._score(policy, payloads[policy], unit)
                    self._show(sum(map(len, found.values())), len(self._prompts) * len(revisions))
        finally:
            with suppress(RunEnded, RunError):
                self._ask("give_back", self._name)
        return found

    def _show(self, done: int, total: int) -> None:
        if done == total or time.monotonic() - self._shown > SHOWN:
            self._tell(f"{done} of {total} units")
            self._shown = time.monotonic()

    def _merged(self) -> dict[str, Revision]:
        """Every policy as a revision: to the same bits on the CPU, and off the run's GPUs."""
        threads = max(1, (os.cpu_count() or 1) // 2)  # no part of what is merged
        fleet = self._config.fleet.model_copy(update={"learners": Learners(threads=threads)})
        config = self._config.model_copy(update={"fleet": fleet})
        merger = on_this_node(Merger, "merger", self._name).remote(config, 0)
        try:
            seconds = config.fleet.deadlines.update
            return merged(merger, config, self._state, self._request.policies, seconds=seconds)
        except wait.WorkerGone:
            self._ask("renew", self._name)  # a run that has ended takes its cluster along
            raise
        finally:
            ray.kill(merger)

    def _payload(self, revision: Revision) -> Any:
        self._receipts.expect(revision.manifest)
        content = Publications(self._config.publish).publish(revision).payload(REGENERATOR)
        return ray.put(np.frombuffer(content, np.uint8))

    def _score(self, policy: str, payload: Any, unit: WorkUnit) -> Evaluated:
        """The answer to a unit, by whatever worker is lent for it."""
        prompt, lost = self._prompts[unit.prompt_id], 0
        pictured = unit.prompt_id in list(self._prompts)[: self._config.evaluation.pictures]
        embedding = self._embedded(prompt)
        while True:
            try:
                held = self._holding(policy, payload)
                answer = held.handle.score.remote(held.loan, unit, prompt, embedding, pictured)
                what = f"{unit.id} on {held.worker}, which is lent"
                evaluated: Evaluated = self._wait(answer, what, self._config.fleet.deadlines.regenerate)
                return evaluated
            except LoanEnded:
                self._held = None
            except (wait.Gone, Leaving) as error:
                self._held, lost = None, lost + 1
                self._ask("give_back", self._name)
                if lost == ATTEMPTS:
                    raise
                self._tell(f"{unit.id} is done again ({error})")

    def _holding(self, policy: str, payload: Any) -> _Held:
        """A worker that is lent now and has proved that it holds the policy."""
        loan = self._borrowed()
        held = self._held
        if held is None or held.loan != loan.number:
            handle = self._actor(loan.worker)
            held = self._held = _Held(loan=loan.number, worker=loan.worker, policy="", handle=handle)
        if held.policy != policy:
            deadlines = self._config.fleet.deadlines
            probe = self._embedded(next(iter(self._prompts.values())))
            answer = held.handle.hold.remote(held.loan, self._config, payload, probe)
            what, seconds = f"loading {policy} on {held.worker}, which is lent", deadlines.start + deadlines.publish
            receipt: Receipt = self._wait(answer, what, seconds)
            self._receipts.check(receipt)
            held.policy = policy
        return held

    def _borrowed(self) -> Any:
        """A loan that may be used for one unit more, as soon as the run's share allows it."""
        share, deadlines = self._config.evaluation.share, self._config.fleet.deadlines
        seconds = deadlines.start + deadlines.update + deadlines.regenerate / share
        deadline = time.monotonic() + seconds
        while True:
            loan = self._ask("borrow", self._name)
            if loan is not None:
                return loan
            if time.monotonic() > deadline:
                raise RunError(f"{self._request.run.name} lent no regenerator within {seconds:g} s")
            if not self._waited:
                self._tell(f"waiting for a regenerator; the run lends {share:.0%} of their working time")
                self._waited = True
            self._held = None
            time.sleep(POLL)

    def _embedded(self, prompt: Prompt) -> Any:
        """Reference of an embedding by the run's own encoder; one at a time, so that the run need not wait long."""
        if prompt.id not in self._embeddings:
            ref = self._encoder.embed.remote(prompt)
            seconds = 2 * self._config.fleet.deadlines.encode * self._config.rollout.prompts
            try:
                self._wait(ref, f"encoding prompt {prompt.id}", seconds)
            except wait.WorkerGone as error:
                raise RunEnded from error
            self._embeddings[prompt.id] = ref
        return self._embeddings[prompt.id]

    def _wait(self, ref: Any, what: str, seconds: float) -> Any:
        """As `wait.get`; the loan, if there is one, is renewed meanwhile."""
        deadline = time.monotonic() + seconds
        while not wait.first_ready([ref], seconds=RENEW_SECONDS) and time.monotonic() < deadline:
            self._ask("renew", self._name)
        return wait.get(ref, what=what, seconds=max(0.0, deadline - time.monotonic()))

    def _ask(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self._controller, method).remote(*arguments)
        try:
            return wait.get(answer, what=f"{method} of the controller", seconds=live_run.ANSWER_SECONDS)
        except wait.WorkerGone as error:
            raise RunEnded from error

    def _actor(self, name: str) -> Any:
        """An actor of the run by its name."""
        try:
            return ray.get_actor(name, namespace=namespace(self._request.run))
        except ValueError:  # it is not there: as a rule, because the run has ended
            self._ask("borrow", self._name)
            raise wait.WorkerGone(name, "it has just been replaced") from None
