"""Evaluations that others ask of a live run (`solrl eval`): beside its updates, within `evaluation.share`.

::

    submit ─► waiting ─► [ beside an update: load ─► units ─► it ends: units that are out end too ]* ─► found
                 └── nobody has asked for 30 s: forgotten

Regenerators have nothing else to do beside an update. What an evaluation holds the run up for, after the update has
ended, is a debt: it is earned back at `evaluation.share` seconds a second before the next one begins. An error or a
loss in somebody else's evaluation ends that evaluation, not the run (docs/decisions/evaluations-of-a-live-run.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.dispatch.hand_out import HandOut
from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.evaluation.evaluator import Evaluation
from actors.training.policy_publisher import PolicyPublisher
from actors.workers.regenerator import Evaluated
from actors.world import World
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import unreproducible_rewards
from solrl_ray.errors import RunError, UserError
from solrl_ray.evaluation.held_out import EVAL_POLICIES, evaluation_units
from solrl_ray.records import Prompt, WorkUnit
from solrl_ray.weight_sync.publication import Publication

PATIENCE = 30.0
"""How long a request counts whose sender does not ask for it, seconds."""
LOSSES = 3
"""Workers that may be lost under one evaluation before it ends."""

Found = dict[str, dict[str, Evaluated]]
"""Policy → prompt id → scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What is asked for."""

    name: str
    """Differs between any two requests."""
    config: Config
    """Prompts, samples, steps, solver and rewards; all else is the run's own."""
    prompts: tuple[Prompt, ...]
    updates: int
    publications: Mapping[str, Publication]
    """By policy, a key of `EVAL_POLICIES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """How far it is."""

    done: int
    total: int
    error: RunError | UserError | None = None
    """What ended it."""
    found: Found | None = None
    """All of it, when it is done."""


class _OutsideEvaluation(Evaluation):
    """Bears its own errors and losses."""

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
            self.failed(RunError(f"{LOSSES} workers were lost under {self.batch}; the last one was {worker}"))
        return True


@dataclass(slots=True)
class _Open:
    request: EvaluationRequest
    polled: float
    evaluations: dict[str, _OutsideEvaluation]
    embeddings: dict[str, Any]
    """By prompt id: references of those that are there."""

    @property
    def error(self) -> RunError | UserError | None:
        return next((each.error for each in self.evaluations.values() if each.error is not None), None)


class EvaluationRequests:
    def __init__(
        self,
        config: Config,
        world: World,
        hand_out: HandOut,
        publisher: PolicyPublisher,
        embeddings: PromptEmbeddings,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` is given a sentence for the user."""
        self._config, self._world, self._hand_out = config, world, hand_out
        self._publisher, self._embeddings, self._tell = publisher, embeddings, tell
        self._open: dict[str, _Open] = {}
        """By name, in the order in which they came."""
        self._submitted = asyncio.Event()
        self._debt, self._accounted = 0.0, world.now()

    # What others call

    def submit(self, request: EvaluationRequest) -> None:
        """Ask for an evaluation. Asking again changes nothing."""
        if request.name not in self._open:
            self._tell(f"an evaluation is asked for: {request.name}")
            embeddings: dict[str, Any] = {}
            evaluations = {policy: self._evaluation(request, policy, embeddings) for policy in request.publications}
            self._open[request.name] = _Open(request, self._world.now(), evaluations, embeddings)
            self._submitted.set()

    def poll(self, name: str) -> RequestProgress | None:
        """How far a request is; None if it is not known, or was forgotten."""
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
        """Its sender has what it wanted, or gives up."""
        this = self._open.pop(name, None)
        for evaluation in this.evaluations.values() if this else ():
            self._hand_out.drop(evaluation)
            evaluation.completed.set()

    # What the run does

    @property
    def wait(self) -> bool:
        """Whether there is something to evaluate in the next window."""
        open_ = self._open.values()
        return any(not (this.error or each.completed.is_set()) for this in open_ for each in this.evaluations.values())

    async def window(self, ended: asyncio.Event, *, free: bool) -> None:
        """Evaluate until `ended` is set, if there is no debt, also what is asked for meanwhile.

        Args:
            free: whether nobody waits for regenerators until then; else all of the time is a debt, and this ends when
                there is nothing to do.
        """
        now = self._world.now()
        self._debt -= self._config.evaluation.share * (now - self._accounted)
        self._debt, self._accounted = max(0.0, self._debt), now
        for this in [this for this in self._open.values() if now - this.polled > PATIENCE]:
            self._tell(f"the evaluation {this.request.name} is forgotten: nobody has asked for it for {PATIENCE:g} s")
            self.forget(this.request.name)
        waited = [] if free else [now]  # since when the run waits: the first of them
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

    async def _evaluate(self, this: _Open, policy: str, evaluation: _OutsideEvaluation, ended: asyncio.Event) -> None:
        """Until it is complete, or `ended` is set and no worker is at a unit of it."""
        for prompt in this.request.prompts:  # one by one: others' prompts are not to wait for all of them
            if ended.is_set() or evaluation.completed.is_set():
                return
            if prompt.id not in this.embeddings:
                this.embeddings[prompt.id] = await self._embeddings.one(prompt)
        async with self._publisher.evaluating(this.request.publications[policy]):
            if evaluation.completed.is_set() or ended.is_set():  # it was forgotten; or the turn came too late
                return
            evaluation.begin()
            await _first_of(ended, evaluation.completed)
            await self._rest(evaluation)

    async def _rest(self, evaluation: _OutsideEvaluation) -> None:
        """Return once no worker is at a unit of it; what waits is taken up in the next window."""
        while True:
            self._hand_out.withdraw(evaluation)  # also what waits again, because its worker was lost
            if not self._hand_out.out(evaluation):
                return
            evaluation.answered.clear()
            await evaluation.answered.wait()  # each unit has its deadline

    def _evaluation(self, request: EvaluationRequest, policy: str, embeddings: Mapping[str, Any]) -> _OutsideEvaluation:
        """`embeddings`: by prompt id, of every prompt before it begins."""
        config, by_id = request.config, {prompt.id: prompt for prompt in request.prompts}
        units = evaluation_units(config, request.prompts, updates=request.updates, policy=EVAL_POLICIES[policy])
        pictured = request.prompts[: config.evaluation.pictures]

        def call(unit: WorkUnit) -> tuple[str, tuple[Any, ...]]:
            prompt = by_id[unit.prompt_id]
            return "score", (config, unit, prompt, embeddings[prompt.id], prompt in pictured)

        return _OutsideEvaluation(
            f"the evaluation {request.name} of {policy}",
            units,
            call,
            self._hand_out,
            strict=False,
            reproducible=not unreproducible_rewards(config),
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
