"""The rollout of the open iterations, prompt groups moving on one by one, in two stages and in one::

explore units to explorers ──► selection ──► regenerate unit to a regenerator ──► group
sample units to explorers ──► selection ──► the selector puts the kept samples together ──► group

Two iterations are open where exploring runs ahead (`scheduling.staleness`): the older one is regenerated and learned
from, the younger one is explored with the revision before its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.cluster import wait
from actors.dispatch.open_iteration import OpenIteration, RolloutResult
from actors.dispatch.selector_client import SelectorClient
from actors.fleet.events import Done, Lost, Nonsense, Work
from actors.fleet.fleet import Fleet
from actors.fleet.pool import Pool
from actors.monitoring.telemetry import Telemetry
from solrl_ray.records import Prompt, UnitResult, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationSummary

ANSWER_PARTS = {"explore": 1, "sample": 2, "regenerate": 2, "audit": 1}
"""A unit's stage, which is also the worker's method → the number of parts of its answer."""

Offer = Callable[[list[int], int, list[Any], list[Any]], None]
"""Samples of each of the iteration's prompts; position of the first group in prompt order, references of groups and of
their embeddings."""


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

    def regenerate(self, iteration: int, policy_digest: str) -> None:
        """From now on regenerators are given units of an open iteration; nothing to do if they are already.

        Args:
            policy_digest: LoRA digest of the revision that they were sent: the iteration's own.
        """
        this = self._open[iteration]
        if not this.regenerates:
            if this.plan.staleness:
                this.add(self._selector.revise(iteration, policy_digest))
            this.regenerates = True

    def run(self, iteration: int, *, explored: Callable[[], None], offer: Offer | None = None) -> RolloutResult:
        """Bring every prompt of an open iteration to its group.

        Args:
            explored: is called once all its candidates are in.
            offer: is given its groups as they come in, in prompt order.
        """
        this = self._open[iteration]
        self._show()
        while not this.complete or this.publication is None:
            if this.explored and this.publication is None:
                self.hand_out()  # what was just selected comes first
                this.publication = self._fleet.publication_counts
                explored()
                continue
            self.hand_out()
            self._round(seconds=1.0)
            if offer is not None:
                self._offer(this, offer)
        order = this.plan.prompt_ids
        return RolloutResult(
            groups=[this.groups[p] for p in order],
            embeddings=[this.embeddings[p] for p in order],
            rewards=[this.rewards[p] for p in order],
            clocks=this.clocks,
            publication=this.publication,
            staleness=this.plan.staleness,
        )

    def close(self, iteration: int) -> IterationSummary:
        """What an iteration of which every prompt has its group came to."""
        closed: IterationSummary = self._ask("close", iteration)
        for sentence in closed.violations:
            self._telemetry.message(f"{sentence}; the first result counts")
        return closed

    def _offer(self, this: OpenIteration, offer: Offer) -> None:
        first, groups, embeddings = this.offer()
        if groups:
            offer([this.plan.keep] * len(this.prompts), first, groups, embeddings)

    def poll(self, *, seconds: float) -> bool:
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
        self.hand_out()
        return True

    def fill_workers(self) -> None:
        """Give units to all who have proved their revision; second ones after who proves it meanwhile has a first one.

        To send units to thousands takes a while, and whoever has none waits.
        """
        for max_inflight in (1, 1, None):
            self._round(seconds=0.0, needed=False)
            self.hand_out(max_inflight)

    def take(self, events: Sequence[Work]) -> None:
        """What events of the fleet mean; those of an iteration that is over, or of an evaluation, mean nothing.

        All answers are brought to the selector together: its journal then waits for the disk once.
        """
        mine = [
            e
            for e in events
            if isinstance(e, Lost) or (e.unit.stage in ANSWER_PARTS and e.unit.iteration in self._open)
        ]
        answers = [event for event in mine if isinstance(event, Done)]
        self._record([event for event in answers if event.unit.stage != "regenerate"])
        groups = [event for event in answers if event.unit.stage == "regenerate"]
        if groups:
            if len(groups) < len(answers):
                self.hand_out()  # what was just selected need not wait for the groups
            self._store(groups)
        for event in mine:
            if isinstance(event, Lost):
                self._release(event.worker)
            elif isinstance(event, Nonsense):
                self._refuse(event.worker, event.unit, event.reason)

    def supply(self) -> list[Any]:
        """The groups of the oldest open iteration once more, from the run folder; references in prompt order.

        What the folder does not hold any more is made again.
        """
        iteration, this = next(iter(self._open.items()))
        this.learned = False  # its update is done once more
        stored = {prompt_id: self._selector.stored(iteration, prompt_id) for prompt_id in this.plan.prompt_ids}
        for prompt_id in [prompt_id for prompt_id, group in stored.items() if group is None]:
            del this.groups[prompt_id], stored[prompt_id]
            self._telemetry.message(f"the stored group of prompt {prompt_id} is damaged: it is made again")
        self._ask_all_again()
        while not this.complete:
            self.hand_out()
            self._round(seconds=1.0)
        return [stored.get(prompt_id, this.groups[prompt_id]) for prompt_id in this.plan.prompt_ids]

    def learned(self, iteration: int) -> None:
        """Note that the update of an iteration is done: its units are handed out no more."""
        self._open[iteration].learned = True

    def drop_before(self, iteration: int) -> None:
        """Let go of the iterations before, which a checkpoint contains."""
        for done in [number for number in self._open if number < iteration]:
            del self._open[done]
            self._selector.drop(done)

    def _round(self, *, seconds: float, needed: bool = True) -> None:
        self.take(self._fleet.events(seconds=seconds, needed=needed))
        self._show()

    def hand_out(self, max_inflight: int | None = None) -> None:
        """Fill free slots, with units of the oldest iteration first; `max_inflight` as for `Pool.slots`."""
        if self._restarts != self._selector.restarts:  # what was known of the old selector's queues is void
            self._restarts = self._selector.restarts
            self._ask_all_again()
        for name, pool in self._fleet.explorers.items():
            self._fill(name, "explore", pool, max_inflight)
        self._fill("regenerators", "regenerate", self._fleet.regenerators, max_inflight)

    def _fill(self, name: str, stage: str, pool: Pool, max_inflight: int | None) -> None:
        able = {i: this for i, this in self._open.items() if this.may(stage)}
        for iteration, this in able.items():
            slots = pool.slots(max_inflight) if name not in this.drained else []
            if slots:
                leases = self._ask("lease", iteration, stage, slots)
                if len(leases) < len(slots):
                    this.drained.add(name)
                self._give(stage, pool, leases)
        nothing_waits = all(name in this.drained for this in able.values())
        if able and nothing_waits and (late := self._fleet.hedges(pool)):
            hedges = self._ask("hedge", late)
            self._give(stage, pool, hedges)
            for worker, unit in hedges:
                self._telemetry.message(f"{unit.id} takes long; {worker} does it as well")

    def _give(self, stage: str, pool: Pool, leases: Sequence[tuple[str, WorkUnit]]) -> None:
        for worker, unit in leases:
            this = self._open[unit.iteration]
            this.clocks["audit" if unit.stage == "audit" else stage].start()
            inputs = (unit, this.prompts[unit.prompt_id], this.embeddings[unit.prompt_id])
            pool.give(worker, unit, unit.stage, *inputs, parts=ANSWER_PARTS[unit.stage])

    def _ask_all_again(self) -> None:
        for this in self._open.values():
            this.drained.clear()

    def _release(self, worker: str) -> None:
        """Have others do what a lost worker had."""
        requeued = self._ask("release", worker)
        self._ask_all_again()
        if requeued:
            self._telemetry.message(f"{len(requeued)} units of {worker} go to others")

    def _refuse(self, worker: str, unit: WorkUnit, reason: str) -> None:
        """Have a unit done again whose answer cannot be right."""
        self._ask("requeue", unit, worker)
        self._ask_all_again()
        if self._fleet.refuse(worker, unit, reason) is not None:
            self._release(worker)

    def _record(self, events: Sequence[Done]) -> None:
        """Have the selector take answers to pools' units and to audits."""
        right = []
        for event in events:
            if event.value.unit == event.unit:
                right.append(event)
            else:
                reason = f"{event.worker} was given {event.unit.id} and answered {event.value.unit}"
                self._refuse(event.worker, event.unit, reason)
        for event, taken in zip(right, self._ask("take", [e.value for e in right]) if right else (), strict=True):
            this = self._open[event.unit.iteration]
            if taken.refused:
                self._refuse(event.worker, event.unit, taken.refused)
            elif event.unit.stage == "audit":
                this.clocks["audit"].stop(event.value.seconds)
                this.audits.add(event.unit.prompt_id)
            else:
                self._recorded(this, event.value, event.large, taken.regenerate)

    def _recorded(self, this: OpenIteration, result: UnitResult, samples: Any, unit: WorkUnit | None) -> None:
        """A result of a pool's unit counts.

        Args:
            samples: reference of those that its worker keeps, if it does.
            unit: its prompt's regenerate unit, if that can be done.
        """
        this.recorded(result.unit, result.seconds)
        if samples is None:
            if unit is not None:
                this.drained.discard("regenerators")
            return
        this.kept[result.unit.prompt_id].setdefault(result.unit, samples)  # the first result of a unit counts
        this.drained.clear()  # chosen samples that are lost are asked for again
        if unit is not None:
            self._assemble(this, unit)

    def _assemble(self, this: OpenIteration, unit: WorkUnit) -> None:
        """Have the selector make a group out of kept samples, by reference; all others of its prompt are let go."""
        kept = this.kept[unit.prompt_id]
        this.kept[unit.prompt_id] = {}
        parts = [samples for source, samples in kept.items() if set(source.indices) & set(unit.indices)]
        try:
            this.rewards[unit.prompt_id], this.groups[unit.prompt_id] = self._selector.assemble(unit, *parts)
        except wait.InputGone as error:  # some went down with their node
            self._ask("lose", unit)
            self._telemetry.message(f"chosen samples of prompt {unit.prompt_id} are made again ({error.reason})")

    def _store(self, events: Sequence[Done]) -> None:
        """Have the selector take groups, by reference: the samples go from the regenerators to the selector."""
        for iteration in {event.unit.iteration for event in events}:
            self._store_together(iteration, [event for event in events if event.unit.iteration == iteration])

    def _store_together(self, iteration: int, events: Sequence[Done]) -> None:
        try:
            answers = self._selector.take_groups(iteration, [event.large for event in events])
        except wait.InputGone as error:  # it went down with its node between the report and this
            if len(events) > 1:  # which of them only tells who brings them one by one
                for event in events:
                    self._store_together(iteration, [event])
            else:
                self._remake(events[0], error.reason)
            return
        this = self._open[iteration]
        for event, taken in zip(events, answers, strict=True):
            report = event.value
            if taken.refused:
                self._refuse(event.worker, event.unit, taken.refused)
                continue
            this.clocks["regenerate"].stop(report.seconds)
            if report.prompt_id not in this.groups:  # the first one counts
                this.groups[report.prompt_id] = event.large
                this.rewards[report.prompt_id] = report.rewards

    def _remake(self, event: Done, reason: str) -> None:
        """Have a group done again that is lost."""
        self._ask("requeue", event.unit, event.worker)
        self._open[event.unit.iteration].drained.discard("regenerators")
        self._telemetry.message(f"{event.unit.id} is done again ({reason})")

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
        for next_one in [each for each in ahead if each.plan.staleness]:
            stages["explore ahead"] = (next_one.candidates, next_one.pool_size)
        for name, (done, total) in stages.items():
            self._telemetry.stage(name, done, total)
