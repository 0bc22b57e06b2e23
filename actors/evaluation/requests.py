"""Evaluations requested from a live run (`solrl eval`): beside its updates, within `evaluation.share`.

::

    submit ─► waiting ─► [ beside an update: load ─► units ─► it ends: units that are out end too ]* ─► found
                 └── no poll for 30 s: forgotten

Regenerators are idle during an update. If an evaluation delays the run after the update, the delay is a debt. It is
paid back at `evaluation.share` seconds a second before the next evaluation begins. An error or a lost worker in such an
evaluation ends the evaluation, not the run (docs/decisions/evaluations-of-a-live-run.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.dispatch.unit_router import UnitRouter
from actors.evaluation.evaluator import Evaluation
from actors.training.policy_publisher import PolicyPublisher
from actors.workers.regenerator import Evaluated
from actors.world import World
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.records import Prompt
from solrl_ray.weight_sync.publication import Publication

PATIENCE = 30.0
"""Seconds after the last poll until a request is forgotten."""
LOSSES = 3
"""Workers that may be lost during one evaluation before it ends."""

Found = dict[str, dict[str, Evaluated]]
"""Policy → prompt id → scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    name: str
    """Unique."""
    config: Config
    """Prompts, samples, steps, solver and rewards; the rest is the run's own."""
    prompts: tuple[Prompt, ...]
    updates: int
    publications: Mapping[str, Publication]
    """By policy, one of `EVAL_POLICIES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    done: int
    """Prompts, counted once for each policy; as `total`."""
    total: int
    error: RunError | UserError | None = None
    """The error that ended it."""
    found: Found | None = None
    """All scores, when it is done."""


class RequestedEvaluation(Evaluation):
    """Handles its own errors and losses."""

    error: RunError | UserError | None = None
    losses = 0

    def failed(self, error: RunError | UserError) -> bool:
        self.error = self.error or error
        self.completed.set()
        self.answered.set()
        return True

    def lost(self, worker: str) -> bool:
        self.losses += 1
        self.answered.set()
        if self.losses == LOSSES:
            self.failed(RunError(f"{LOSSES} workers were lost during {self.batch}; the last one was {worker}"))
        return True


@dataclass(slots=True)
class _Open:
    request: EvaluationRequest
    polled: float
    evaluations: dict[str, RequestedEvaluation]
    embeddings: dict[str, Any]
    """By prompt id: references of finished embeddings."""

    @property
    def error(self) -> RunError | UserError | None:
        return next((each.error for each in self.evaluations.values() if each.error is not None), None)


class EvaluationRequests:
    def __init__(
        self,
        config: Config,
        world: World,
        router: UnitRouter,
        publisher: PolicyPublisher,
        embeddings: PromptEmbeddings,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` is given a sentence for the user."""
        self._config, self._world, self._router = config, world, router
        self._publisher, self._embeddings, self._tell = publisher, embeddings, tell
        self._open: dict[str, _Open] = {}
        """By name, in the order of arrival."""
        self._submitted = asyncio.Event()
        self._debt, self._accounted = 0.0, world.now()

    # Called from outside

    def submit(self, request: EvaluationRequest) -> None:
        """Request an evaluation. A repeated request changes nothing."""
        if request.name not in self._open:
            self._tell(f"an evaluation was requested: {request.name}")
            embeddings: dict[str, Any] = {}
            evaluations = {policy: self._evaluation(request, policy, embeddings) for policy in request.publications}
            self._open[request.name] = _Open(request, self._world.now(), evaluations, embeddings)
            self._submitted.set()

    def poll(self, name: str) -> RequestProgress | None:
        """Progress of a request; None if it is unknown or forgotten."""
        this = self._open.get(name)
        if this is None:
            return None
        this.polled = self._world.now()
        evaluations = this.evaluations
        total = len(this.request.prompts) * len(evaluations)
        done = sum(len(each.answers) for each in evaluations.values())
        found = {policy: each.answers for policy, each in evaluations.items()} if done == total else None
        return RequestProgress(done=done, total=total, error=this.error, found=found)

    def forget(self, name: str) -> None:
        """The sender has the result, or gives up."""
        this = self._open.pop(name, None)
        for evaluation in this.evaluations.values() if this else ():
            self._router.drop(evaluation)
            evaluation.completed.set()
            evaluation.answered.set()  # answers to its units that are out will be ignored

    # Called by the run

    @property
    def wait(self) -> bool:
        """Whether the next window has something to evaluate."""
        open_ = self._open.values()
        return any(not (this.error or each.completed.is_set()) for this in open_ for each in this.evaluations.values())

    async def window(self, ended: asyncio.Event, *, free: bool) -> None:
        """Unless there is a debt, evaluate until `ended` is set, including requests that arrive meanwhile.

        `free`: whether regenerators are idle until then. If not, all of the time is a debt, and this returns when
        nothing is left to do.
        """
        now = self._world.now()
        self._debt -= self._config.evaluation.share * (now - self._accounted)
        self._debt, self._accounted = max(0.0, self._debt), now
        for this in [this for this in self._open.values() if now - this.polled > PATIENCE]:
            self._tell(f"the evaluation {this.request.name} is dropped: its sender has not polled for {PATIENCE:g} s")
            self.forget(this.request.name)
        waited = [] if free else [now]  # since when the run waits, as its first element
        over = asyncio.ensure_future(ended.wait())
        over.add_done_callback(lambda _: waited.append(self._world.now()))
        try:
            while True:
                self._submitted.clear()
                for this in list(self._open.values()):
                    for policy, evaluation in this.evaluations.items():
                        if not (self._debt or this.error or evaluation.completed.is_set()):
                            await self._evaluate(this, policy, evaluation, ended)
                if not free or ended.is_set():
                    break
                await _first_of(ended, self._submitted)
        finally:
            over.cancel()
        self._debt += self._world.now() - waited[0] if waited else 0.0

    async def _evaluate(self, this: _Open, policy: str, evaluation: RequestedEvaluation, ended: asyncio.Event) -> None:
        """Run until it is complete, or `ended` is set and no worker has a unit of it."""
        for prompt in this.request.prompts:  # one by one, so that the run's own prompts need not wait for all of them
            if ended.is_set() or evaluation.completed.is_set():
                return
            if prompt.id not in this.embeddings:
                try:
                    made = await self._embeddings.one(prompt, this.request.config.evaluated_model)
                except UserError as error:  # its picture is gone, or was never on this machine
                    evaluation.failed(error)
                    return
                this.embeddings[prompt.id] = made
        async with self._publisher.evaluating(this.request.publications[policy]):
            if evaluation.completed.is_set() or ended.is_set():  # it was forgotten, or the turn came too late
                return
            evaluation.begin()
            await _first_of(ended, evaluation.completed)
            await self._rest(evaluation)

    async def _rest(self, evaluation: RequestedEvaluation) -> None:
        """Return once no worker has a unit of it; the rest waits for the next window."""
        while True:
            self._router.withdraw(evaluation)  # includes units that wait again because their worker was lost
            if not self._router.out(evaluation):
                return
            evaluation.answered.clear()
            await evaluation.answered.wait()  # each unit has its deadline

    def _evaluation(
        self, request: EvaluationRequest, policy: str, embeddings: Mapping[str, Any]
    ) -> RequestedEvaluation:
        return RequestedEvaluation(
            f"the evaluation {request.name} of {policy}",
            request.config,
            request.prompts,
            embeddings,
            self._router,
            updates=request.updates,
            policy=policy,
            method="score",
            strict=False,
            tell=self._tell,
        )


async def _first_of(*events: asyncio.Event) -> None:
    """Return once one of them is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
