"""The section `fleet`: number, resources and labels of the workers, their placement, replacement limits, and the
deadline of each named wait (`deadlines`).
"""

from __future__ import annotations

from typing import Literal

from solrl_ray.config.section import AtLeastZero, Natural, Positive, Seconds, Section, Workers


class WorkerResources(Section):
    """Resources of one actor. They are always explicit, because otherwise Ray reserves a CPU for the actor's life."""

    num_cpus: AtLeastZero = 0.0
    """CPUs that Ray reserves per worker."""
    num_gpus: AtLeastZero = 0.0
    """GPUs that Ray reserves per worker; 0: the worker computes on CPUs. With a fraction such as 0.5, two explorers or
    regenerators share one GPU, each with its own copy of the model. Learners need whole GPUs.
    """
    threads: Positive = 1
    """CPU threads of the process; part of the score class."""
    labels: dict[str, str] = {}
    """Required node labels, as Ray label selectors: ``{role: explorer}``; values may be ``!x`` or ``in(a,b)``."""

    @property
    def selectors(self) -> list[dict[str, str]]:
        """Label selectors of suitable nodes, the preferred ones first."""
        return [self.labels]


class WorkerPool(WorkerResources):
    """Workers of one role, all with the same resources."""

    count: Workers = 1
    """Number of workers."""
    fallback_labels: list[dict[str, str]] = []
    """Label selectors to try, in this order, if no node with `labels` has free resources; ``{}``: any node."""

    @property
    def selectors(self) -> list[dict[str, str]]:
        return [self.labels, *self.fallback_labels]


class Encoders(WorkerPool):
    """Prompt encoders. `threads`, the device type and `micro_batch` are part of an embedding's cache key."""

    micro_batch: Positive | None = None
    """Texts per encoding batch, always this size; null: 16 on GPUs, 1 on CPUs."""
    ahead: Positive | None = None
    """Iterations whose prompts are encoded together, if the disk has space. With more, the text encoders are loaded
    onto the GPUs less often. null: 16 if the encoders are on the learners' GPUs, else 1.
    """


class Learners(WorkerResources):
    """Ranks of the learner group. Their Ray placement group is kept while the learner group is rebuilt."""

    placement: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Strategy of the Ray placement group. ``PACK``: few nodes. ``STRICT_PACK``: one node. ``SPREAD``: many nodes.
    ``STRICT_SPREAD``: a different node for each rank.
    """


class Deadlines(Section):
    """Time limit of each named wait, seconds."""

    resources: AtLeastZero = 0.0
    """Waiting for nodes to join before any actor starts; 0: the run ends at once if resources are missing. During the
    run: waiting for a worker's resources takes at most this plus `start`. After that the worker is reported missing;
    the run ends if its pool has no other worker or if it is the learner group.
    """

    start: Seconds = 180.0
    """Construction of an actor after Ray has placed it: imports, weights, attestation."""
    warm_up: Seconds = 900.0
    """Compiling a worker's forward for one sample shape, if it is compiled; takes minutes without cached code in
    `compile.cache`.
    """
    explore: Seconds = 120.0
    """Previews, per micro-batch. A unit's deadline is this times its micro-batches."""
    regenerate: Seconds = 300.0
    """Regeneration or evaluation, per prompt. Prompts evaluated in one forward get this times their number. With
    one-stage strategies also the sampling of one unit of a pool.
    """
    update: Seconds = 1800.0
    """One learner update."""
    collective: Seconds = 1800.0
    """Joining the learner group, and each collective operation of ranks on CPUs. If this is shorter than `update`, a
    hanging rank on a CPU ends the run instead of having the group rebuilt. On GPUs only `update` limits collective
    operations.
    """
    publish: Seconds = 120.0
    """Fetching, loading and attesting one policy revision; in a learner's process, preparing for it."""
    selector: Seconds = 60.0
    """One call to the selector."""
    encode: Seconds = 60.0
    """Encoding, per prompt. A batch gets this times the number of its prompts, the same again for each reference image,
    and `start` if it must reload the text encoders. Before the run: checking one reference image.
    """
    fetch: Seconds = 120.0
    """Fetching a worker's result, the samples of an iteration or their embeddings."""
    checkpoint: Seconds = 600.0
    """Writing a checkpoint to the run folder and removing old ones; also any other access of the controller to the run
    folder: metrics, an evaluation, the report.
    """
    upload: Seconds = 600.0
    """Copying the last checkpoints and the report at the run's end, if `checkpoints.upload` is set."""
    tracking: Seconds = 120.0
    """One call to one of `tracking.trackers`; at the run's end, all pending calls together. A tracker that misses it is
    dropped, and the run continues.
    """


class FleetConfig(Section):
    """The workers, and how long the run waits for them. These settings do not change results."""

    explorers: WorkerPool = WorkerPool(count=2)
    regenerators: WorkerPool = WorkerPool(count=1)
    encoders: Encoders = Encoders()
    """Not used if `placement` is ``colocated`` and `learners` have GPUs: then each learner rank's GPU encodes prompts.
    """
    learners: Learners = Learners(threads=2)
    """Resources of each learner rank; `learner.world_size` is the number of ranks."""
    max_inflight: Positive = 2
    """Units in flight per worker: one running, the rest queued."""
    max_replacements: Natural = 8
    """Maximum number of worker replacements in one run. Beyond it the run stops with a diagnosis."""
    strikes: Positive = 3
    """A worker is replaced after this many invalid results (NaN, wrong revision, too few values)."""
    strict: bool = False
    """End the run if a repeated unit gives different bytes; otherwise the difference is only counted and reported."""
    network: str = ""
    """Network interface of the learner group, such as ``eth0``; empty: as the node's `NCCL_SOCKET_IFNAME` and
    `GLOO_SOCKET_IFNAME` say.
    """
    placement: Literal["colocated", "split"] = "split"
    """``colocated``: the explorer, regenerator and learner rank with the same number run in one process, share one copy
    of the model and use the resources of `learners`. Explorers and regenerators beyond the number of ranks have
    separate processes. ``split``: each worker has a separate process and its own copy of the model.
    """
    offload: bool | None = None
    """Offload frozen weights to host memory while their quantised copies explore, in processes with several roles. Then
    a whole iteration is explored before it is regenerated. null: only if GPU memory is too small for both.
    """
    deadlines: Deadlines = Deadlines()
