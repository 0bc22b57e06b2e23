"""The section `fleet`: number, resources and labels of the workers, strikes, replacements,
placement, and how long each named wait may take (`deadlines`).
"""

from __future__ import annotations

from typing import Literal

from solrl_ray.config.section import AtLeastZero, Natural, Positive, Seconds, Section, Workers


class WorkerResources(Section):
    """Resources of one actor; always explicit, because Ray holds its implied CPU for the actor's life."""

    num_cpus: AtLeastZero = 0.0
    """CPUs that Ray reserves for each."""
    num_gpus: AtLeastZero = 0.0
    """GPUs that Ray reserves for each; 0 means the CPU. With a share such as 0.5, two explorers or regenerators compute
    on one GPU at once, each with its own copy of the model; learners have whole GPUs.
    """
    threads: Positive = 1
    """Compute threads of the process; part of the score class."""
    labels: dict[str, str] = {}
    """Labels that a node must have, as Ray's label selectors: ``{role: explorer}``; ``!x``, ``in(a,b)``."""

    @property
    def selectors(self) -> list[dict[str, str]]:
        """Labels of its nodes, the preferred ones first."""
        return [self.labels]


class WorkerPool(WorkerResources):
    """Actors of one kind, each with these resources."""

    count: Workers = 1
    """How many there are."""
    fallback_labels: list[dict[str, str]] = []
    """Labels of nodes to use if none with `labels` has room, in this order; ``{}``: any node."""

    @property
    def selectors(self) -> list[dict[str, str]]:
        return [self.labels, *self.fallback_labels]


class Encoders(WorkerPool):
    """Workers that embed prompts. Threads, kind of device and `micro_batch` are part of an embedding's identity."""

    micro_batch: Positive | None = None
    """Texts encoded at once, always as many; null: 16 on GPUs, 1 on CPUs."""
    ahead: Positive | None = None
    """How many iterations' prompts are encoded together, if the disk has room: with more, text encoders come to the
    cards less often; null: 16 on the cards of learners, else 1.
    """


class Learners(WorkerResources):
    """Ranks of the learner group. Their places are reserved together, and kept while the group is rebuilt."""

    placement: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Ray's strategies: on few nodes, on one node, on many nodes, each rank on another node."""


class Deadlines(Section):
    """The longest that each named wait may take, seconds."""

    resources: AtLeastZero = 0.0
    """Waiting for nodes to join before any actor starts; 0: the run ends at once. Later, together with `start`: waiting
    for a worker's place. Then the worker is reported; if its pool has no other, or it is the learner group, the run
    ends.
    """

    start: Seconds = 180.0
    """An actor's construction once it has a place: imports, weights, attestation."""
    warm_up: Seconds = 900.0
    """Compiling a worker's forward for one shape, if it is compiled; minutes if `compile.cache` is empty."""
    explore: Seconds = 120.0
    """One micro-batch of previews; a unit of several gets this much for each."""
    regenerate: Seconds = 300.0
    """Regeneration or evaluation of one prompt; prompts that are evaluated in one forward get this much for
    each. Also one unit of a pool in strategies of one stage.
    """
    update: Seconds = 1800.0
    """One learner update."""
    collective: Seconds = 1800.0
    """Joining the learner group; also each collective operation of ranks on CPUs, where a rank that hangs ends the run
    instead of rebuilding the group if this is shorter than `update`. On GPUs only `update` limits them.
    """
    publish: Seconds = 120.0
    """Fetching, swapping in and proving one revision; on a card, preparing for it."""
    selector: Seconds = 60.0
    """One call to the selector."""
    encode: Seconds = 60.0
    """The embedding of one prompt; a batch of several gets this much for each, as much again for each of their
    reference pictures, and `start` if it must load the text encoders again. Before the run, looking at one picture.
    """
    fetch: Seconds = 120.0
    """Fetching an answer, the samples of an iteration or their embeddings."""
    checkpoint: Seconds = 600.0
    """Writing a checkpoint to the run folder and removing old ones; also whatever else the controller reads or writes
    there: metrics, an evaluation, the report.
    """
    upload: Seconds = 600.0
    """Copying the last checkpoints and the report at the run's end, if `checkpoints.upload` is set."""
    tracking: Seconds = 120.0
    """One call to one of `tracking.trackers`, and at the run's end all open calls. A slower tracker gets nothing more;
    the run goes on.
    """


class FleetConfig(Section):
    """The workers, and how long the run waits for them. Changes no result."""

    explorers: WorkerPool = WorkerPool(count=2)
    regenerators: WorkerPool = WorkerPool(count=1)
    encoders: Encoders = Encoders()
    """With GPUs and `placement` colocated, each card has an encoder instead."""
    learners: Learners = Learners(threads=2)
    """Resources of each rank; `learner.world_size` is their number."""
    max_inflight: Positive = 2
    """Units in flight per worker: one running, the rest queued."""
    max_replacements: Natural = 8
    """Workers that may be replaced in one run before it stops with a diagnosis."""
    strikes: Positive = 3
    """A worker is replaced after this many answers that cannot be right (NaN, another revision, too few values)."""
    strict: bool = False
    """Whether a repeated result with other bytes ends the run; else it is counted and shown."""
    network: str = ""
    """Network interface of the learner group, such as ``eth0``; empty: the node's `NCCL_SOCKET_IFNAME` and
    `GLOO_SOCKET_IFNAME` decide.
    """
    placement: Literal["colocated", "split"] = "split"
    """``colocated``: explorer, regenerator and learner rank of one number are roles of one process, with one copy of
    the model; `learners` has its resources. Explorers and regenerators beyond the number of ranks have processes of
    their own. ``split``: each has its own process and copy.
    """
    offload: bool | None = None
    """In a process with several roles: whether frozen weights leave the card while their quantised copies explore. Then
    a whole iteration is explored before it is regenerated. null: where the card is too small for both.
    """
    deadlines: Deadlines = Deadlines()
