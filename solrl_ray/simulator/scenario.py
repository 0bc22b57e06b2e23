"""The input of a simulated run: its work, its fleet, and all costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from solrl_ray.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Seconds of the work itself, on a worker of usual speed."""

    explore: float
    """One unit of a prompt's pool: previews or, in one stage, the samples themselves."""
    regenerate: float
    """Regeneration of one prompt."""
    update: float
    """One learner update, all ranks at work."""
    checkpoint: float = 0.0
    publication: float = 0.0
    """Making a revision: merge, quantise, write."""
    load: float = 0.0
    """Verifying, swapping in and proving a revision on a worker that has received it."""
    merge: float = 0.0
    """Merging, quantising and proving it on a card that also learns, which has the factors already."""


class Orchestration(Section):
    """Seconds of the controller, which does one thing at a time, and of the selector, which does so in parallel."""

    worker: float = 0.0
    """A look at one worker; the controller looks at all of them five times a second."""
    call: float = 0.0
    """Choosing a worker for a unit, and sending it the unit, its prompt and the reference of an embedding."""
    load: float = 0.0
    """Sending one call with the references of a revision and of a probe's embedding."""
    answer: float = 0.0
    """Taking one small answer, and updating the controller's state."""
    ask: float = 0.0
    """From a call to the selector to its answer, if it has nothing to do for it; the controller continues meanwhile."""
    open: float = 0.0
    """The selector's work for each unit of an iteration's pools, to open it."""
    queue: float = 0.0
    """The controller's work to plan and queue such a unit."""
    embed: float = 0.0
    """The controller's work to have a prompt encoded, among many."""
    commit: float = 0.0
    """The selector's wait for the disk, once a call."""
    record: float = 0.0
    """The selector's own work for one result of a pool's unit among many."""
    candidate: float = 0.0
    """The same for each reward in it."""
    store: float = 0.0
    """As `record`, for a sample group."""
    write: float = 0.0
    """Writing a group's file, in parallel with the selector and other files."""
    hop: float = 0.0
    """Delay of a message, which affects only its receiver."""
    gap: float = 0.0
    """A worker's overhead between two units."""
    iteration: float = 0.0
    """Once an iteration: everything but messages of units and revisions, such as opening it, calls to the learner
    group, metrics.
    """


FREE = Orchestration()


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How a revision reaches the nodes: each holder sends it to `fanout` others at a time."""

    payload: float
    """Bytes of a revision."""
    bandwidth: float
    """Bytes a second that one node sends; its receivers share them."""
    workers_per_node: int = 8
    """Of each pool, without those on cards; a node receives one copy for all of its workers."""
    fanout: int = 2

    def arrival(self, index: int, nodes: int) -> float:
        """Seconds until node `index` of `nodes` has the payload.

        A round multiplies the holders by fanout + 1 and takes as long as one node needs to send `fanout` copies.
        """
        fanout = min(self.fanout, nodes)
        rounds, holders = 0, 1
        while holders - 1 <= index:
            rounds, holders = rounds + 1, holders * (fanout + 1)
        return rounds * fanout * self.payload / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    spread: float = 0.0
    """Standard deviation of the logarithm of a unit's time; the mean stays."""
    slow_share: float = 0.0
    """Probability that a worker is a straggler for its whole life."""
    slow_factor: float = 1.0
    """A straggler's time for a unit, relative to the others."""
    mtbf: float = math.inf
    """Mean seconds between failures of one worker or learner rank (exponential)."""
    restart: float = 0.0
    """From a worker's loss until its replacement can load; also for the learner group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    prompts: int
    pool: int
    keep: int
    unit: int
    """Candidates of one unit of a pool; divides `pool`."""
    explorers: int
    regenerators: int
    learners: int = 1
    max_inflight: int = 2
    hedge: float = 0.0
    """Medians of its stage after which an idle worker repeats a unit; 0: never."""
    one_stage: bool = False
    """The pool's own samples are learned from: no regeneration; the selector makes the groups."""
    max_staleness: int = 0
    """How many revisions explorers may be behind (`scheduling.staleness`)."""
    cards: int = 0
    """Explorer, regenerator and learner rank i < `cards` are one process, which does one thing at a time."""
    shared: bool = False
    """Explorer i and regenerator i, in processes of their own, compute on one device."""
    staged: bool = False
    """An iteration is regenerated once all of it is explored (`fleet.offload`)."""
    stages: Stages
    orchestration: Orchestration = FREE
    network: Network | None = None
    """None: revisions arrive at once."""
    disturbances: Disturbances = Disturbances()
    seed: int = 0
