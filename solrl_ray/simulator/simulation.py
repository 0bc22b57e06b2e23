"""A run in virtual time: the real ledger, iteration state, selection and worker states; stages and messages that only
cost time.

::

    publish ─► [ hand out ─► wait ─► take what came ]* ─► update ─► …
            └► checkpoint                             └─►

The same goes on during update and the making of a revision: with staleness, the next iteration is explored then.

One clock is the controller's, who does one thing at a time as `actors.dispatch.rollout` does: what it spends on a
message delays the next. Workers run what they were handed in order, `max_inflight` units deep. Results come from no
model: proxy rewards are addressed random numbers, so that selections are real ones. Pure; equal scenarios give equal
results.

Left out: hung workers (a deadline's length is a choice, not a cost), late units that are handed out a second time
(``fleet.hedge``), prompt encoding, evaluations, contention of compute threads, traffic other than that of revisions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from solrl_ray.errors import RunError
from solrl_ray.records import SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationState, IterationSummary
from solrl_ray.scheduling.staleness import may_explore, staleness_of
from solrl_ray.scheduling.worker_state import State, advance, replacement_name, role_of
from solrl_ray.simulator.chance import Chance
from solrl_ray.simulator.pool import SimulatedPool, SimulatedWorker
from solrl_ray.simulator.scenario import Scenario

ROLES = ("explorer", "regenerator")
LOSSES = 10
"""Losses of each worker and rank in one iteration, on average, after which it is said never to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedIteration:
    """Seconds of one iteration; its parts follow one another and make up `seconds`."""

    seconds: float
    publish: float
    """Revision and sending it off, until units are handed out."""
    rollout: float
    """From there to the last group, the wait for the revision's arrival included."""
    explored: float
    """From the begin of the rollout to the last result of a pool's unit, 0 if that came before; regeneration overlaps
    with it."""
    update: float
    """With what is left to wait for the checkpoint, and for groups on their way to the disk."""
    busy: dict[str, float]
    """Seconds at work, summed over the workers of a role; of ``controller``, those of the rollout."""
    lost: int
    closed: IterationSummary


@dataclass(slots=True)
class _Open:
    """An iteration under way."""

    state: IterationState
    waiting: dict[str, bool]
    """Role → whether it may have units for it."""
    explored: float
    """When the last result of a pool's unit came."""


@dataclass(frozen=True, slots=True)
class _Event:
    kind: str
    """``started``, ``loaded``, ``done`` or ``lost``."""
    worker: str
    unit: WorkUnit | None = None
    publication: int = 0
    seconds: float = 0.0


class Simulation:
    """One run.

    >>> from solrl_ray.simulator.scenario import Stages
    >>> stages = Stages(explore=1.0, regenerate=1.0, update=1.0)
    >>> scenario = Scenario(
    ...     prompts=2, pool=4, keep=2, micro_batch=4, explorers=1, regenerators=1, stages=stages
    ... )
    >>> Simulation(scenario).iterate().seconds  # explore, explore ∥ regenerate, regenerate, update
    4.0
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._costs = scenario.orchestration
        self._chance = Chance(scenario)
        self._now = 0.0
        self._written = 0.0
        """When all groups are on the disk."""
        self._controller = 0.0
        self._iteration = 0
        self._sequence = 0
        self._lost = 0
        self._heap: list[tuple[float, int, _Event]] = []
        self._device_free: dict[str, float] = {}
        self._pools = {role: SimulatedPool(role) for role in ROLES}
        self._working = ROLES[:1] if scenario.one_stage else ROLES
        self._open_iterations: dict[int, _Open] = {}
        for role, count in (("explorer", scenario.explorers), ("regenerator", scenario.regenerators)):
            for index in range(count):
                member = self._open(role, f"{role}-{index}")
                member.state = advance(member.state, "started")

    def run(self, iterations: int) -> Iterator[SimulatedIteration]:
        """The next `iterations`, one after the other."""
        return (self.iterate() for _ in range(iterations))

    def iterate(self) -> SimulatedIteration:
        """The next iteration, from the update of the one before to its own.

        Raises RunError if workers fail so often that it does not end.
        """
        scenario, began, lost, present = self._scenario, self._now, self._lost, self._iteration
        self._lost_before = lost
        self._busy = dict.fromkeys(ROLES, 0.0)
        self._aside(scenario.stages.publication)
        self._now += self._costs.iteration
        if staleness_of(present, scenario.max_staleness) == 0:
            self._publish("explorer", present)
        if present not in self._open_iterations:
            self._begin(present)
            self._serve()
        self._publish("regenerator", present)
        opened, self._controller = self._now, 0.0
        saved, this = opened + scenario.stages.checkpoint, self._open_iterations[present]
        self._explore_ahead()
        while not this.state.complete:
            self._hand_out()
            self._take_all(self._arrived())
        rolled, controller = self._now, self._controller
        self._aside(max(0.0, saved - rolled))
        self._update()
        self._now = max(self._now, self._written)
        self._iteration += 1
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
            closed=this.state.close(),
        )

    def _begin(self, iteration: int) -> None:
        scenario = self._scenario
        plan = IterationPlan(
            iteration=iteration,
            revision=iteration,
            staleness=staleness_of(iteration, scenario.max_staleness),
            prompt_ids=tuple(f"{number:016x}" for number in range(scenario.prompts)),
            pool=scenario.pool,
            keep=scenario.keep,
            micro_batch=scenario.micro_batch,
            one_stage=scenario.one_stage,
        )
        self._open_iterations[iteration] = _Open(
            IterationState(plan), dict.fromkeys(self._working, True), explored=self._now
        )

    # What the controller does

    def _explore_ahead(self) -> None:
        """The explorers go on with the next iteration, if they may."""
        following, explored = self._iteration + 1, self._open_iterations[self._iteration].state.explore.complete
        staleness, iterations = self._scenario.max_staleness, self._iteration + 2
        if following not in self._open_iterations and may_explore(
            following, present=self._iteration, explored=explored, max_staleness=staleness, iterations=iterations
        ):
            if self._pools["explorer"].revision != self._iteration:
                self._publish("explorer", self._iteration)
            self._begin(following)

    def _publish(self, role: str, revision: int) -> None:
        pool = self._pools[role]
        pool.revision = revision
        for member in pool.members.values():
            member.state = advance(member.state, "outdated")
            pool.settle(member, self._scenario.max_inflight)
            self._spend(self._costs.load)
            if member.state is State.STALE:
                self._load(member)

    def _hand_out(self, max_inflight: int | None = None) -> None:
        """Fill free slots; `max_inflight`: units that a worker may have, if not all that it may at other times."""
        for iteration, this in self._open_iterations.items():
            regenerated = self._pools["regenerator"].revision == iteration == self._iteration
            for role in self._working if regenerated else ROLES[:1]:
                self._hand_out_stage(this, role, max_inflight or self._scenario.max_inflight)

    def _hand_out_stage(self, this: _Open, role: str, max_inflight: int) -> None:
        pool = self._pools[role]
        worker = pool.slot(max_inflight) if this.waiting[role] else None
        if worker is None:
            return
        self._spend(self._costs.ask)
        ledger = this.state.explore if role == "explorer" else this.state.regenerate
        while worker is not None:
            unit = ledger.lease(worker)
            if unit is None:
                this.waiting[role] = False
                break
            self._spend(self._costs.call)
            self._give(pool, pool.members[worker], unit)
            worker = pool.slot(max_inflight)

    def _serve(self) -> None:
        """As `Rollout.fill_workers`."""
        for max_inflight in (1, 1, None):
            if self._heap and self._heap[0][0] <= self._now:
                self._take_all(self._arrived())
            self._hand_out(max_inflight)

    def _aside(self, seconds: float) -> None:
        """Time that the learner group needs, while everybody else goes on."""
        until = self._now + seconds
        while self._heap and self._heap[0][0] < until:
            self._hand_out()
            self._take_all(self._arrived())
        self._hand_out()
        self._now = max(self._now, until)

    def _arrived(self) -> list[_Event]:
        """Wait for the next event; it, and whatever else is there by then."""
        self._now = max(self._now, self._heap[0][0])
        events = []
        while self._heap and self._heap[0][0] <= self._now:
            events.append(heapq.heappop(self._heap)[2])
        workers = sum(len(pool.members) for pool in self._pools.values())
        self._spend(self._costs.round + self._costs.worker * workers)
        return events

    def _take_all(self, events: list[_Event]) -> None:
        """As `Rollout.take`: results of pools' units come to the selector together, and after them groups."""
        for event in events:
            if event.kind != "lost":
                self._settle(event)
        explored = [event for event in events if event.unit is not None and event.unit.stage != "regenerate"]
        stored = [event.unit for event in events if event.unit is not None and event.unit.stage == "regenerate"]
        if explored:
            self._bring(len(explored), self._costs.record + self._costs.candidate * self._scenario.micro_batch)
            for event in explored:
                self._record(event)
        if stored:
            if explored:
                self._hand_out()
            self._bring(len(stored), self._costs.store)
            for unit in stored:
                self._store(unit)
        for event in events:
            if event.kind == "lost":
                self._replace(event.worker)

    def _settle(self, event: _Event) -> None:
        """An answer, as its pool takes it."""
        pool = self._pools[role_of(event.worker)]
        member = pool.members[event.worker]
        self._spend(self._costs.answer)
        if event.kind == "done":
            member.units -= 1
            self._busy[role_of(event.worker)] += event.seconds
        elif event.kind == "started":
            member.state = advance(member.state, "started")
            self._load(member)
        elif event.publication == pool.revision:
            member.state = advance(member.state, "proved")
        pool.settle(member, self._scenario.max_inflight)

    def _bring(self, count: int, cost: float) -> None:
        """The selector takes so many at a time; groups are written while it and the controller go on."""
        self._spend(self._costs.ask + self._costs.commit + count * cost)

    def _record(self, event: _Event) -> None:
        unit = event.unit
        assert unit is not None
        this, rewards = self._open_iterations[unit.iteration], self._chance.rewards(unit)
        result = UnitResult(
            unit=unit,
            rewards=tuple(rewards[index] for index in unit.indices),
            worker=event.worker,
            score_class="simulated",
            seconds=event.seconds,
        )
        this.state.record(result)
        this.explored = self._now
        full = this.state.ready(unit.prompt_id)
        if full is not None and self._scenario.one_stage:  # put together one by one
            self._bring(1, self._costs.store)
            self._store(full)
        elif full is not None:
            this.waiting["regenerator"] = True
        if unit.iteration == self._iteration:
            self._explore_ahead()

    def _store(self, unit: WorkUnit) -> None:
        rewards = self._chance.rewards(unit)
        group = SampleGroup(
            iteration=unit.iteration,
            revision=unit.revision,
            prompt_id=unit.prompt_id,
            indices=unit.indices,
            rewards=tuple(rewards[index] for index in unit.indices),
            latents=torch.zeros(len(unit.indices), 1),
        )
        self._open_iterations[unit.iteration].state.record_group(group)
        self._written = max(self._written, self._now) + self._costs.write

    def _replace(self, worker: str) -> None:
        pool = self._pools[role_of(worker)]
        member = pool.members[worker]
        self._spend(self._costs.ask)
        member.state = advance(member.state, "lost")
        del pool.members[member.name]
        self._lose()
        for this in self._open_iterations.values():
            this.state.explore.release(member.name)
            this.state.regenerate.release(member.name)
            this.waiting = dict.fromkeys(self._working, True)
        if not self._scenario.colocated:  # a shared device goes on with what the other tenant was given
            self._device_free[member.device] = self._now
        replacement = self._open(pool.role, replacement_name(member.name))
        self._push(self._now + self._scenario.disturbances.restart, replacement, _Event("started", replacement.name))

    def _update(self) -> None:
        """The learners' update; if a rank fails in it, the group starts again and repeats it."""
        seconds, attempt = self._scenario.stages.update, 0
        while (failed := self._chance.learners_life(self._iteration, attempt)) < seconds:
            self._aside(failed + self._scenario.disturbances.restart)
            self._lose()
            attempt += 1
        self._aside(seconds)

    def _lose(self) -> None:
        self._lost += 1
        scenario = self._scenario
        everybody = scenario.explorers + scenario.regenerators + scenario.learners
        if self._lost - self._lost_before > LOSSES * everybody:
            raise RunError(
                f"iteration {self._iteration} does not end: {everybody} workers with a mean of "
                f"{scenario.disturbances.mtbf:g} s between failures are lost faster than they finish"
            )

    def _spend(self, seconds: float) -> None:
        self._now += seconds
        self._controller += seconds

    # What the workers do

    def _open(self, role: str, name: str) -> SimulatedWorker:
        slot = int(name.partition(".")[0].partition("-")[2])
        dies = self._now + self._chance.life(name)
        member = SimulatedWorker(
            name=name,
            device=f"device-{slot}" if self._scenario.colocated else name.partition(".")[0],
            node=slot // (self._scenario.network.workers_per_node if self._scenario.network else 1),
            factor=self._scenario.disturbances.slow_factor if self._chance.is_slow(name) else 1.0,
            dies=dies,
        )
        self._pools[role].members[name] = member
        if math.isfinite(dies):
            self._sequence += 1
            heapq.heappush(self._heap, (dies, self._sequence, _Event("lost", name)))
        return member

    def _give(self, pool: SimulatedPool, member: SimulatedWorker, unit: WorkUnit) -> None:
        stages = self._scenario.stages
        usual = stages.regenerate if unit.stage == "regenerate" else stages.explore
        seconds = usual * member.factor * self._chance.factor(unit)
        begins = max(self._now + self._costs.hop, self._device_free.get(member.device, 0.0))
        self._device_free[member.device] = begins + seconds + self._costs.gap
        member.units += 1
        pool.settle(member, self._scenario.max_inflight)
        self._push(begins + seconds + self._costs.hop, member, _Event("done", member.name, unit=unit, seconds=seconds))

    def _load(self, member: SimulatedWorker) -> None:
        """The revision travels and is proved; the worker's pool sits on nodes of its own unless colocated."""
        network, arrives = self._scenario.network, self._now + self._costs.hop
        if network is not None:
            scenario = self._scenario
            counts = (scenario.explorers, scenario.regenerators)
            nodes = [math.ceil(count / network.workers_per_node) for count in counts]
            if scenario.colocated:
                arrives += network.arrival(member.node, max(nodes))
            else:
                before = 0 if role_of(member.name) == "explorer" else nodes[0]
                arrives += network.arrival(before + member.node, sum(nodes))
        event = _Event("loaded", member.name, publication=self._pools[role_of(member.name)].revision)
        self._push(arrives + self._scenario.stages.load + self._costs.hop, member, event)

    def _push(self, time: float, member: SimulatedWorker, event: _Event) -> None:
        """Something will arrive, unless the worker is dead by then."""
        if time < member.dies:
            self._sequence += 1
            heapq.heappush(self._heap, (time, self._sequence, event))
