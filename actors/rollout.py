"""The rollout of the open iterations, prompt groups moving on one by one, in two stages and in one::

preview units to explorers ──► selection ──► full unit to a regenerator ──► group
sample units to explorers ──► selection ──► the selector puts the kept samples together ──► group

Two iterations are open where exploring runs ahead (`scheduling.lead`): the older one is regenerated and learned from,
the younger one is explored with the revision before its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors import waiting
from actors.events import Done, Lost, Nonsense, Work
from actors.fleet import Fleet
from actors.iteration import OpenIteration, RolledOut
from actors.pool import Pool
from actors.selector_client import SelectorClient
from actors.telemetry import Telemetry
from solrl_ray.errors import NonsenseError
from solrl_ray.records import Prompt, UnitResult, WorkUnit
from solrl_ray.scheduling.book import IterationPlan

CALLS = {"preview": ("explore", 1), "sample": ("sample", 2), "full": ("regenerate", 2), "audit": ("audit", 1)}
"""A unit's stage → the worker's method and the number of parts of its answer."""


class Rollout:
    def __init__(self, fleet: Fleet, selector: SelectorClient, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._selector = selector
        self._telemetry = telemetry
        self._open: dict[int, OpenIteration] = {}
        """By number, the oldest first."""
        self._restarts = 0

    def open(self, plan: IterationPlan, prompts: Sequence[Prompt], embeddings: Mapping[str, Any]) -> None:
        """Begin an iteration: from now on explorers are given its units.

        Args:
            embeddings: prompt id → reference of its embedding.
        """
        opened = self._selector.open(plan)
        if opened.message:
            self._telemetry.message(opened.message)
        self._open[plan.iteration] = OpenIteration(plan, prompts, embeddings, opened)

    def is_open(self, iteration: int) -> bool:
        return iteration in self._open

    def run(self, iteration: int, *, policy_digest: str, explored: Callable[[], None]) -> RolledOut:
        """Bring every prompt of an open iteration to its group.

        Args:
            policy_digest: LoRA digest of the revision that the regenerators were sent: the iteration's own.
            explored: is called once all its candidates are in.
        """
        this = self._open[iteration]
        if not this.regenerates:
            this.add(self._selector.revise(iteration, policy_digest))
            this.regenerates = True
        self._show()
        while not this.complete or this.publication is None:
            if this.explored and this.publication is None:
                this.publication = self._fleet.publication_counts
                explored()
                continue
            self.hand_out()
            self._round(seconds=1.0)
        order = this.plan.prompt_ids
        closed = self._ask("close", iteration)
        for sentence in closed.violations:
            self._telemetry.message(f"{sentence}; the first result counts")
        return RolledOut(
            closed=closed,
            groups=[this.groups[p] for p in order],
            embeddings=[this.embeddings[p] for p in order],
            rewards=[this.rewards[p] for p in order],
            clocks=this.clocks,
            publication=this.publication,
            lead=this.plan.lead,
        )

    def go_on(self, *, seconds: float) -> bool:
        """Look after the fleet, and give it what it may do, while the controller waits for something else.

        Args:
            seconds: the longest that this may wait for something to happen.

        Returns:
            Whether anybody is at work.
        """
        self._fleet.adjust()
        self.hand_out()
        if not self._fleet.at_work:
            return False
        self._round(seconds=seconds, needed=False)
        return True

    def take(self, event: Work) -> None:
        """What an event of the fleet means; one of an iteration that is over, or of an evaluation, means nothing."""
        if isinstance(event, Lost):
            requeued = self._ask("release", event.worker)
            self._ask_all_again()
            if requeued:
                self._telemetry.message(f"{len(requeued)} units of {event.worker} go to others")
            return
        this = self._open.get(event.unit.iteration)
        if this is None or event.unit.stage not in CALLS:
            return
        if isinstance(event, Nonsense):
            self._refuse(event.worker, event.unit, event.reason)
            return
        try:
            self._accept(this, event)
        except NonsenseError as error:
            self._refuse(event.worker, event.unit, str(error))

    def supply(self) -> list[Any]:
        """The groups of the oldest open iteration once more, from the run folder; references in prompt order.

        What the folder does not hold any more is made again.
        """
        iteration, this = next(iter(self._open.items()))
        stored = {prompt_id: self._selector.stored(iteration, prompt_id) for prompt_id in this.plan.prompt_ids}
        for prompt_id in [prompt_id for prompt_id, group in stored.items() if group is None]:
            del this.groups[prompt_id], stored[prompt_id]
            self._telemetry.message(f"the stored group of prompt {prompt_id} is damaged: it is made again")
        self._ask_all_again()
        while not this.complete:
            self.hand_out()
            self._round(seconds=1.0)
        return [stored.get(prompt_id, this.groups[prompt_id]) for prompt_id in this.plan.prompt_ids]

    def drop_before(self, iteration: int) -> None:
        """Let go of the iterations before, which a checkpoint contains."""
        for done in [number for number in self._open if number < iteration]:
            del self._open[done]
            self._selector.drop(done)

    def _round(self, *, seconds: float, needed: bool = True) -> None:
        for event in self._fleet.events(seconds=seconds, needed=needed):
            self.take(event)
        self._show()

    def hand_out(self) -> None:
        """Fill every free slot, with units of the oldest iteration first."""
        if self._restarts != self._selector.restarts:  # what was known of the old selector's queues is void
            self._restarts = self._selector.restarts
            self._ask_all_again()
        for stage, pool in (("explore", self._fleet.explorers), ("regenerate", self._fleet.regenerators)):
            able = {i: this for i, this in self._open.items() if this.may(stage)}
            for iteration, this in able.items():
                slots = pool.slots() if this.waiting[stage] else []
                if slots:
                    leases = self._ask("lease", iteration, stage, slots)
                    this.waiting[stage] = len(leases) == len(slots)
                    self._give(stage, pool, leases)
            nothing_waits = not any(this.waiting[stage] for this in able.values())
            if able and nothing_waits and (late := self._fleet.hedges(pool)):
                hedges = self._ask("hedge", late)
                self._give(stage, pool, hedges)
                for worker, unit in hedges:
                    self._telemetry.message(f"{unit.id} takes long; {worker} does it as well")

    def _give(self, stage: str, pool: Pool, leases: Sequence[tuple[str, WorkUnit]]) -> None:
        for worker, unit in leases:
            this = self._open[unit.iteration]
            this.clocks["audit" if unit.stage == "audit" else stage].start()
            method, parts = CALLS[unit.stage]
            inputs = (unit, this.prompts[unit.prompt_id], this.embeddings[unit.prompt_id])
            pool.give(worker, unit, method, *inputs, parts=parts)

    def _ask_all_again(self) -> None:
        for this in self._open.values():
            this.waiting = dict.fromkeys(this.stages, True)

    def _refuse(self, worker: str, unit: WorkUnit, reason: str) -> None:
        """Have a unit done again whose answer cannot be right."""
        self._ask("requeue", unit, worker)
        self._ask_all_again()
        lost = self._fleet.refuse(worker, unit, reason)
        if lost is not None:
            self.take(lost)

    def _accept(self, this: OpenIteration, event: Done) -> None:
        """Raises NonsenseError for an answer that is none."""
        if event.unit.stage == "full":
            self._store(this, event)
            return
        if event.value.unit != event.unit:
            raise NonsenseError(f"{event.worker} was given {event.unit.id} and answered {event.value.unit}")
        if event.unit.stage == "audit":
            this.clocks["audit"].stop(event.value.seconds)
            self._ask("fold_audit", event.value)
            this.audits.add(event.unit.prompt_id)
        else:
            self._fold(this, event.value, event.large)

    def _fold(self, this: OpenIteration, result: UnitResult, samples: Any) -> None:
        """Have the selector take a result; `samples` is the reference of those that its worker keeps, if it does."""
        unit = self._ask("fold", result)
        this.folded(result.unit, result.seconds)
        if samples is None:
            this.waiting["regenerate"] |= unit is not None
            return
        this.kept[result.unit.prompt_id].setdefault(result.unit, samples)  # the first result of a unit counts
        this.waiting["explore"] = True  # chosen samples that are lost are asked for again
        if unit is not None:
            self._assemble(this, unit)

    def _assemble(self, this: OpenIteration, unit: WorkUnit) -> None:
        """Have the selector make a group out of kept samples, by reference; all others of its prompt are let go."""
        kept = this.kept[unit.prompt_id]
        this.kept[unit.prompt_id] = {}
        parts = [samples for source, samples in kept.items() if set(source.indices) & set(unit.indices)]
        try:
            this.rewards[unit.prompt_id], this.groups[unit.prompt_id] = self._selector.assemble(unit, *parts)
        except waiting.InputGone as error:  # some went down with their node
            self._ask("lose", unit)
            self._telemetry.message(f"chosen samples of prompt {unit.prompt_id} are made again ({error.reason})")

    def _store(self, this: OpenIteration, event: Done) -> None:
        """Have the selector take a group, by reference: the samples go from the regenerator to the selector."""
        unit, report, group = event.unit, event.value, event.large
        try:
            self._ask("store", group)
        except waiting.InputGone as error:  # it went down with its node between the report and this
            self._ask("requeue", unit, event.worker)
            this.waiting["regenerate"] = True
            self._telemetry.message(f"{unit.id} is done again ({error.reason})")
            return
        this.clocks["regenerate"].stop(report.seconds)
        if report.prompt_id not in this.groups:  # the first one counts
            this.groups[report.prompt_id] = group
            this.rewards[report.prompt_id] = report.rewards

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._selector.ask(method, *arguments)

    def _show(self) -> None:
        """Progress of the oldest open iteration, and of the one that is explored ahead."""
        if not self._open:
            return
        this, *ahead = self._open.values()
        stages = {"explore": (this.candidates, this.pool_size)}
        stages["select" if this.plan.one_stage else "regenerate"] = (len(this.groups), len(this.prompts))
        if this.audited:
            stages["audit"] = (len(this.audits), this.audited)
        for next_one in ahead:
            stages["explore ahead"] = (next_one.candidates, next_one.pool_size)
        for name, (done, total) in stages.items():
            self._telemetry.stage(name, done, total)
