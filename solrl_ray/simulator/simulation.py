"""A run in virtual time: the real dispatcher, iteration state, selection and worker states; stages and messages that
only cost time.

::

    publish ─► [ wait ─► take what came ─► bring it to the selector ─► hand out ]* ─► update ─► …
            └► checkpoint                                                         └─►

The same goes on during update and the making of a revision: with staleness, the next iteration is explored then.

One clock is the controller's, which does one thing at a time: the time for a message delays the next. As in the event
loop of a live run, each turn takes all messages so far, calls the selector for them, and hands out units. The selector
answers one call after the other, and messages that arrive meanwhile go in its next call. Workers do their units in
order, `max_inflight` deep. There is no model: proxy rewards are addressed random numbers, so that selections are real
ones. Pure; equal scenarios give equal results.

Left out: hung workers (a deadline's length is a choice, not a cost), refused answers, audits, prompt encoding (except
its messages), evaluations, contention of compute threads, all traffic except revisions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from solrl_ray.errors import RunError
from solrl_ray.records import SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.dispatcher import Dispatcher
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationState
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.scheduling.staleness import staleness_of
from solrl_ray.scheduling.worker_state import State, advance, pool_of, replacement_name, role_of, slot_of
from solrl_ray.simulator.chance import Chance
from solrl_ray.simulator.records import Event, OpenIteration, SimulatedIteration, Worker
from solrl_ray.simulator.scenario import Scenario

ROLES = ("explorer", "regenerator")
LOSSES = 10
"""Average losses of each worker and rank in one iteration after which it counts as endless."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at all workers, as in `actors.fleet.fleet`."""


class Simulation:
    """One run.

    >>> from solrl_ray.simulator.scenario import Stages
    >>> stages = Stages(explore=1.0, regenerate=1.0, update=1.0)
    >>> scenario = Scenario(
    ...     prompts=2, pool=4, keep=2, unit=4, explorers=1, regenerators=1, stages=stages
    ... )
    >>> Simulation(scenario).iterate().seconds  # explore, explore ∥ regenerate, regenerate, update
    4.0
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._costs = scenario.orchestration
        self._chance = Chance(scenario)
        self._dispatcher = Dispatcher(max_inflight=scenario.max_inflight, hedge=scenario.hedge, strikes=1)
        self._now = 0.0
        self._written = 0.0
        """When all groups are on the disk."""
        self._controller = 0.0
        self._iteration = 0
        self._sequence = 0
        self._lost = self._hedged = 0
        self._heap: list[tuple[float, int, Event]] = []
        self._looks_again = False
        """Whether a ``look`` event is pending."""
        self._looked = 0.0
        """When the controller last looked at all workers."""
        self._device_free: dict[str, float] = {}
        self._workers: dict[str, dict[str, Worker]] = {role: {} for role in ROLES}
        self._published = dict.fromkeys(ROLES, 0)
        """Role → the last revision sent to its workers."""
        self._open_iterations: dict[int, OpenIteration] = {}
        self._inbox: list[Event] = []
        """Messages for the selector."""
        self._calls: list[tuple[Event, ...]] = []
        """The same, grouped into its next calls."""
        self._selector_answers = True
        """Whether it has answered its last call."""
        self._selector_free = 0.0
        for role, count in (("explorer", scenario.explorers), ("regenerator", scenario.regenerators)):
            for index in range(count):
                worker = self._open(role, f"{role}-{index}")
                worker.state = advance(worker.state, "started")
        self._want_pools(0)
        self._now = 0.0  # as after any other update, which ran in parallel

    def run(self, iterations: int) -> Iterator[SimulatedIteration]:
        """The next `iterations`, one after the other."""
        return (self.iterate() for _ in range(iterations))

    def iterate(self) -> SimulatedIteration:
        """The next iteration, from the update before to its own.

        Raises RunError if workers fail so often that it does not end.
        """
        scenario, began, lost, present = self._scenario, self._now, self._lost, self._iteration
        self._lost_before, self._hedged = lost, 0
        self._busy = dict.fromkeys(ROLES, 0.0)
        self._aside(scenario.stages.publication)
        self._now += self._costs.iteration
        if staleness_of(present, scenario.max_staleness) == 0:
            self._begin(present)
            self._publish("explorer", present)
        this = self._open_iterations[present]
        while not this.is_open:
            self._turn()
        self._publish("regenerator", present)
        opened, self._controller = self._now, 0.0
        saved = opened + scenario.stages.checkpoint
        self._explore_ahead()
        while not this.state.complete:
            self._turn()
        rolled, controller = self._now, self._controller
        self._aside(max(0.0, saved - rolled))
        self._update()
        self._now = max(self._now, self._written)
        self._iteration += 1
        requeued = self._dispatcher.requeued[this.batch]
        self._dispatcher.drop(this.batch)
        del self._open_iterations[present]
        self._chance.forget(present)
        return SimulatedIteration(
            seconds=self._now - began,
            publish=opened - began,
            rollout=rolled - opened,
            explored=max(0.0, this.explored - opened),
            update=self._now - rolled,
            busy=self._busy | {"controller": controller},
            lost=self._lost - lost,
            requeued=requeued,
            hedged=self._hedged,
            closed=this.state.close(),
        )

    # The controller

    def _begin(self, iteration: int) -> None:
        """Have the selector open an iteration, in parallel."""
        if iteration not in self._open_iterations:
            self._want_pools(iteration)
        units = self._scenario.prompts * self._scenario.pool // self._scenario.unit
        self._ask(units * self._costs.open, Event("opened", number=iteration))

    def _want_pools(self, iteration: int) -> None:
        """Queue an iteration's units, which wait for explorers that hold its revision."""
        scenario = self._scenario
        plan = IterationPlan(
            iteration=iteration,
            revision=iteration,
            staleness=staleness_of(iteration, scenario.max_staleness),
            prompt_ids=tuple(f"{number:016x}" for number in range(scenario.prompts)),
            pool=scenario.pool,
            keep=scenario.keep,
            unit=scenario.unit,
            one_stage=scenario.one_stage,
        )
        this = self._open_iterations[iteration] = OpenIteration(IterationState(plan), explored=self._now)
        units = plan.pool_units()
        self._spend(scenario.prompts * self._costs.embed + len(units) * self._costs.queue)
        self._dispatcher.add(units, batch=this.batch, pool="explorers", priority=iteration)

    def _explore_ahead(self) -> None:
        """Let the explorers go on with the next iteration, if allowed."""
        following, explored = self._iteration + 1, self._open_iterations[self._iteration].state.is_explored
        if self._scenario.max_staleness and explored and following not in self._open_iterations:
            if self._published["explorer"] != self._iteration:
                self._publish("explorer", self._iteration)
            self._begin(following)

    def _publish(self, role: str, revision: int) -> None:
        self._published[role] = revision
        for worker in self._workers[role].values():
            worker.state = advance(worker.state, "outdated")
            self._dispatcher.not_ready(worker.name)
            if worker.state is State.STALE and not worker.loading:
                self._load(worker)

    def _hand_out(self) -> None:
        """As `actors.dispatch.unit_router.UnitRouter`."""
        for each in self._dispatcher.assign(self._now):
            self._spend(self._costs.call)
            self._hedged += each.hedge
            self._give(self._workers[role_of(each.worker)][each.worker], each.unit)
        seconds = self._dispatcher.hedge_look(self._now)
        if seconds is not None and not self._looks_again:
            self._looks_again = True
            self._happens(self._now + seconds, Event("look"))

    def _aside(self, seconds: float) -> None:
        """Time of the learner group or the selector, in parallel with the rest."""
        until = self._now + seconds
        while self._heap and self._heap[0][0] < until:
            self._turn()
        self._now = max(self._now, until)

    def _turn(self) -> None:
        """Wait for the next event, and handle all events up to then."""
        self._now = max(self._now, self._heap[0][0])
        if self._now >= self._looked + LOOK_SECONDS:
            self._spend(self._costs.worker * sum(len(workers) for workers in self._workers.values()))
            self._looked = self._now
        events = []
        while self._heap and self._heap[0][0] <= self._now:
            events.append(heapq.heappop(self._heap)[2])
        for event in events:
            self._take(event)
        self._bring()
        self._hand_out()

    def _take(self, event: Event) -> None:
        if event.kind == "look":
            self._looks_again = False
            return
        self._spend(self._costs.answer)
        if event.kind == "done":
            assert event.unit is not None
            self._dispatcher.answered(event.worker, event.unit, now=self._now, seconds=event.seconds)
            self._busy[role_of(event.worker)] += event.seconds
            this = self._open_iterations.get(event.unit.iteration)
            (self._inbox if this is None or this.is_open else this.early).append(event)
        elif event.kind == "judged":
            self._selector_answers = True
            for each in event.brought:
                self._judged(each)
        elif event.kind == "opened":
            this = self._open_iterations[event.number]
            this.is_open = True
            self._inbox += this.early
        elif event.kind == "assembled":
            assert event.unit is not None
            self._store(event.unit)
        elif event.kind == "lost":
            self._replace(event.worker)
        else:
            self._advance(self._workers[role_of(event.worker)][event.worker], event)

    def _advance(self, worker: Worker, event: Event) -> None:
        """A worker has started, or has loaded a revision, which may be outdated by then."""
        revision = self._published[role_of(worker.name)]
        worker.loading = False
        if event.kind == "loaded" and event.number == revision:
            worker.state = advance(worker.state, "proved")
            self._dispatcher.ready(worker.name, pool_of(worker.name), ("old", revision))
            return
        if event.kind == "started":
            worker.state = advance(worker.state, "started")
        self._load(worker)

    def _replace(self, name: str) -> None:
        worker = self._workers[role_of(name)].pop(name)
        worker.state = advance(worker.state, "lost")
        roles_are_together = slot_of(name) < min(self._scenario.cards, self._scenario.explorers)
        if role_of(name) == "explorer" or not roles_are_together:  # a card counts once
            self._lose()
        self._dispatcher.lost(name)
        if not self._scenario.shared:  # a shared device continues with the other tenant's units
            self._device_free[worker.device] = self._now
        replacement = self._open(role_of(name), replacement_name(name))
        self._push(self._now + self._scenario.disturbances.restart, replacement, Event("started", replacement.name))

    def _update(self) -> None:
        """The learners' update; if a rank fails, the group restarts and repeats it. Meanwhile the units of the next
        iteration are queued, whose revision explorers get first.
        """
        seconds, attempt, ends = self._scenario.stages.update, 0, self._now + self._scenario.stages.update
        if not self._scenario.max_staleness:
            self._want_pools(self._iteration + 1)
        while (failed := self._chance.learners_life(self._iteration, attempt)) < seconds:
            self._aside(failed + self._scenario.disturbances.restart)
            self._lose()
            attempt += 1
            ends = self._now + seconds
        self._aside(max(0.0, ends - self._now))

    def _lose(self) -> None:
        self._lost += 1
        scenario = self._scenario
        workers = scenario.explorers + scenario.regenerators + scenario.learners
        if self._lost - self._lost_before > LOSSES * workers:
            raise RunError(
                f"iteration {self._iteration} does not end: {workers} workers with a mean of "
                f"{scenario.disturbances.mtbf:g} s between failures are lost faster than they finish"
            )

    def _spend(self, seconds: float) -> None:
        self._now += seconds
        self._controller += seconds

    # The selector

    def _bring(self) -> None:
        """As `actors.dispatch.selector_client.SelectorClient`: results, then the groups that came with them."""
        if not self._selector_answers:
            return
        if not self._calls:
            results = tuple(event for event in self._inbox if not event.of_group)
            groups = tuple(event for event in self._inbox if event.of_group)
            self._calls = [part for part in (results, groups) if part]
            self._inbox.clear()
        if self._calls:
            together, costs = self._calls.pop(0), self._costs
            result = costs.record + costs.candidate * self._scenario.unit
            each = costs.store if together[0].of_group else result
            self._selector_answers = False
            self._ask(len(together) * each, Event("judged", brought=together))

    def _ask(self, seconds: float, answer: Event) -> None:
        """Have the selector do something that takes `seconds`, besides its journal and the messages."""
        begins = max(self._now, self._selector_free)
        self._spend(self._costs.call)
        self._selector_free = begins + self._costs.commit + seconds
        self._happens(self._selector_free + self._costs.ask, answer)

    def _judged(self, event: Event) -> None:
        unit = event.unit
        assert unit is not None
        self._dispatcher.done(unit)
        if unit.iteration not in self._open_iterations:
            return  # another worker's result came first
        if unit.stage == "regenerate":
            self._store(unit)
        else:
            self._record(event, unit)

    def _record(self, event: Event, unit: WorkUnit) -> None:
        this, rewards = self._open_iterations[unit.iteration], self._chance.rewards(unit)
        result = UnitResult(
            unit=unit,
            rewards=tuple(rewards[index] for index in unit.indices),
            worker=event.worker,
            score_class="simulated",
            seconds=event.seconds,
        )
        outcome, selection = this.state.record(result)
        if outcome is Outcome.ACCEPTED:
            this.explored = self._now
        if selection is not None and this.state.plan.one_stage:  # made one by one
            self._ask(self._costs.store, Event("assembled", unit=this.state.regenerate_unit(selection)))
        elif selection is not None:
            this.held.append(this.state.regenerate_unit(selection))
        if not self._scenario.staged or this.state.is_explored:
            self._dispatcher.add(this.held, batch=this.batch, pool="regenerators", priority=unit.iteration)
            this.held.clear()
        if unit.iteration == self._iteration:
            self._explore_ahead()

    def _store(self, unit: WorkUnit) -> None:
        rewards = self._chance.rewards(unit)
        nothing: Any = np.zeros((len(unit.indices), 1), np.float32)  # no tensor: a forecast needs no PyTorch
        group = SampleGroup(
            iteration=unit.iteration,
            revision=unit.revision,
            prompt_id=unit.prompt_id,
            indices=unit.indices,
            rewards=tuple(rewards[index] for index in unit.indices),
            latents=nothing,
        )
        if self._open_iterations[unit.iteration].state.record_group(group) is Outcome.ACCEPTED:
            self._written = max(self._written, self._now) + self._costs.write

    # The workers

    def _open(self, role: str, name: str) -> Worker:
        scenario, slot = self._scenario, slot_of(name)
        on_card = slot < scenario.cards
        # The roles of a card die together, and so do those that replace them.
        dies = self._now + self._chance.life(name.replace(role, "card") if on_card else name)
        worker = Worker(
            name=name,
            device=f"device-{slot}" if on_card or scenario.shared else name.partition(".")[0],
            node=(slot - scenario.cards) // (scenario.network.workers_per_node if scenario.network else 1),
            factor=scenario.disturbances.slow_factor if self._chance.is_slow(name) else 1.0,
            dies=dies,
        )
        self._workers[role][name] = worker
        if math.isfinite(dies):
            self._happens(dies, Event("lost", name))
        return worker

    def _give(self, worker: Worker, unit: WorkUnit) -> None:
        stages = self._scenario.stages
        usual = stages.regenerate if unit.stage == "regenerate" else stages.explore
        seconds = usual * worker.factor * self._chance.factor(unit)
        begins = max(self._now + self._costs.hop, self._device_free.get(worker.device, 0.0))
        worker.free = begins + seconds
        self._device_free[worker.device] = worker.free + self._costs.gap
        self._push(worker.free + self._costs.hop, worker, Event("done", worker.name, unit=unit, seconds=seconds))

    def _load(self, worker: Worker) -> None:
        """The revision travels unless it is on the card, is loaded after the worker's units, and is proved; the workers
        of a pool that are on no card have nodes of their own.
        """
        self._spend(self._costs.load)
        scenario, arrives = self._scenario, self._now + self._costs.hop
        network, on_card = scenario.network, slot_of(worker.name) < scenario.cards
        if network is not None and not on_card:
            counts = (scenario.explorers - scenario.cards, scenario.regenerators - scenario.cards)
            nodes = [math.ceil(max(0, count) / network.workers_per_node) for count in counts]
            before = 0 if role_of(worker.name) == "explorer" else nodes[0]
            arrives += network.arrival(before + worker.node, sum(nodes))
        worker.loading = True
        loaded = max(arrives, worker.free) + (scenario.stages.merge if on_card else scenario.stages.load)
        event = Event("loaded", worker.name, number=self._published[role_of(worker.name)])
        self._push(loaded + self._costs.hop, worker, event)

    def _push(self, time: float, worker: Worker, event: Event) -> None:
        """Schedule a worker's event, unless it is dead by then."""
        if time < worker.dies:
            self._happens(time, event)

    def _happens(self, time: float, event: Event) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, event))
