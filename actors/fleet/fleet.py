"""All pools: their sizes, receipts that prove which weights workers hold, time spent waiting for weights, and a watch
for draining nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from actors.dispatch.unit_router import UnitRouter
from actors.fleet.pool import Pool
from actors.fleet.worker import PayloadRefs, Weights, Worker
from actors.monitoring.telemetry import Telemetry
from actors.world import Process, Tasks, World
from solrl_ray.config.pools import EXPLORERS, REGENERATORS, encodes_here, needs_packed
from solrl_ray.config.problems import listed
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_unit_seconds
from solrl_ray.errors import RunError
from solrl_ray.records import Attestation, Receipt
from solrl_ray.scheduling.scaling import Targets
from solrl_ray.scheduling.worker_state import Replacements, pool_of, role_of
from solrl_ray.weight_sync.publication import CARD, EXPLORER, REGENERATOR, Publication
from solrl_ray.weight_sync.receipts import ReceiptBook

NODES_SECONDS = 2.0
"""Seconds between two checks for draining nodes."""
SHOW_SECONDS = 0.2
"""Minimum seconds between two updates of the displayed worker states; each update visits every worker."""
_NO_COUNTS = dict.fromkeys(("bytes", "packed", "bumped", "resyncs", "load_seconds"), 0.0)
"""Counts of a publication that no worker has loaded yet: see `IterationMetrics.publication`."""


class Waits:
    """Finished waits for weights since the last call of `share`. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._ended: list[tuple[float, float]] = []

    def add(self, seconds: float, *, until: float) -> None:
        """Record a wait of `seconds` that ended at time `until`, when the worker had proved the weights."""
        self._ended.append((until - seconds, until))

    def share(self, *, began: float, ended: float, workers: int) -> float:
        """Fraction of `workers` × (`ended` - `began`) that the waits recorded since the last call took.

        A wait that started earlier counts from `began`.
        """
        waited = sum(max(0.0, until - max(since, began)) for since, until in self._ended)
        self._ended.clear()
        return waited / (workers * (ended - began)) if ended > began and workers else 0.0


class Fleet:
    def __init__(
        self, config: Config, world: World, tasks: Tasks, telemetry: Telemetry, *, explores: bool = True
    ) -> None:
        """`explores`: True if the fleet has explorers."""
        self._config, self._world, self._tasks, self._telemetry = config, world, tasks, telemetry
        self._receipts = ReceiptBook()
        self._first: dict[str, Attestation] = {}
        """Pool name → attestation of the first worker that started in it."""
        self._attested = asyncio.Event()
        self.publication_counts = dict(_NO_COUNTS)
        """State of the explorers' newest revision: see `IterationMetrics.publication`."""
        self._payloads: PayloadRefs | None = None
        """Payloads of the latest publication."""
        self._targets = Targets(config, explores=explores)
        self._waits = Waits()
        self._shows = False
        self.replacements = Replacements(config.fleet.max_replacements)
        self._pools: dict[str, Pool] = {}
        self.router = UnitRouter(world, config.fleet, telemetry, self._retire)
        deadlines = config.fleet.deadlines
        unit_seconds = pool_unit_seconds(config)
        make = partial(
            Pool,
            world=world,
            tasks=tasks,
            router=self.router,
            deadlines=deadlines,
            replacements=self.replacements,
            observer=self,
        )
        self.explorers = make(EXPLORERS, world.explorer, unit_seconds=unit_seconds)
        self.regenerators = make(REGENERATORS, world.regenerator, unit_seconds=deadlines.regenerate)
        self._pools |= {EXPLORERS: self.explorers, REGENERATORS: self.regenerators}
        tasks.start(self._watch_nodes(), "the watch for draining nodes")

    # Called by the controller

    def open(self) -> None:
        """Create all workers, without waiting for them."""
        self._resize()

    async def scale(self, sizes: Mapping[str, int]) -> str:
        """Resize pools; `sizes` maps names of `config.pools` to worker counts. Returns sentences that describe the
        effect, one per line.

        Raises UserError for sizes out of bounds.
        """
        effect = self._targets.ask(sizes)
        for sentence in effect.splitlines():
            self._telemetry.message(sentence)
        self._resize()
        wanted, seconds = self._targets.applied(self._config), self._config.fleet.deadlines.fetch
        lacking = await self._world.blocking(
            lambda: self._world.survey(wanted), "reading the cluster's resources", seconds
        )
        if not lacking:
            return effect
        waits = f"no room for {' and '.join(lacking)} now: they start when the cluster has room"
        self._telemetry.message(waits)
        return f"{effect}\n{waits}"

    def prepare(self) -> None:
        """Let explorers on shared GPUs prepare for the next revision, without waiting."""
        for worker in self.explorers.workers.values():
            if worker.process.name and worker.proved:
                self._tasks.start(worker.prepare(), f"preparing {worker.name}")

    async def publish(self, role: str, publication: Publication, probe: Any) -> None:
        """Make all workers of a role load a revision. Each gets units again only after its receipt was accepted.

        Args:
            role: ``explorer`` or ``regenerator``.
            probe: reference to the prompt embedding of the probe forward.
        """
        if self._payloads is None or self._payloads.publication is not publication:
            self._payloads = PayloadRefs(publication, self._world, self._config.fleet.deadlines.publish)
        pool = self.explorers if role == EXPLORER else self.regenerators
        weights = Weights(self._payloads, probe)
        elsewhere = any(not worker.process.name for worker in pool.workers.values())
        size = await weights.payloads.size(role if elsewhere else CARD)
        if role == EXPLORER:
            packed, bumped = bool(publication.revision.packed), len(publication.revision.manifest.bumped)
            counts = {"bytes": float(size), "packed": float(packed), "bumped": float(bumped)}
            self.publication_counts = _NO_COUNTS | counts
        pool.publish(weights)

    @property
    def needs_packed(self) -> bool:
        """True if explorers need packed weights: at least one, now or after scaling, shares no GPU with a learner rank,
        and explorers do not merge the LoRA themselves.
        """
        if self._config.publish.mode == "lora":
            return False
        beyond = any(not worker.process.name for worker in self.explorers.workers.values())
        return beyond or needs_packed(self._config, self._targets.wanted(EXPLORERS))

    async def score_class(self) -> str:
        """Score classes of all pools, joined: they determine the exact bits of answers. Waits until a worker of each
        pool has started.
        """
        await self._attested.wait()  # each start has its deadline
        return "/".join(self._first[name].score_class for name in self._pools)

    def waited_for_weights(self, began: float) -> float:
        """Fraction of the explorers' time since `began` that was spent waiting for weights."""
        workers = len(self.explorers.workers)
        return self._waits.share(began=began, ended=self._world.now(), workers=workers)

    # Events of workers (`Observer`)

    def started(self, worker: Worker, attestation: Attestation) -> None:
        """Accept a started worker.

        Raises RunError if its score class differs from that of its pool: results would depend on which worker
        computed them.
        """
        if attestation.warm_ups and worker.pool not in self._first:
            self._telemetry.message(
                f"{role_of(worker.name)}s compile their forward pass for {attestation.warm_ups} shapes before "
                "their first unit; this takes minutes unless compile.cache has the kernels"
            )
        first = self._first.setdefault(worker.pool, attestation)
        if attestation.score_class != first.score_class:
            raise RunError(
                f"{attestation.worker} and {first.worker} would score the same unit differently: one computes "
                f"{attestation.tier} on {attestation.device} (score class {attestation.score_class}), the other "
                f"{first.tier} on {first.device} (score class {first.score_class}); all workers of a pool need the "
                "same kind of device, precision and software"
            )
        if len(self._first) == len(self._pools):
            self._attested.set()
        self._telemetry.attested(attestation)
        self.changed()

    def loaded(self, receipt: Receipt, publication: Publication, waited: float) -> None:
        # Not at publication: later revisions may have been published since.
        self._receipts.expect(publication.revision.manifest)
        self._receipts.check(receipt)
        self._telemetry.proved(receipt, waited=waited)
        if receipt.role == EXPLORER:
            self._waits.add(waited, until=self._world.now())
            self.publication_counts["load_seconds"] = max(self.publication_counts["load_seconds"], receipt.seconds)

    def resynced(self, worker: str, reason: str) -> None:
        self.publication_counts["resyncs"] += 1
        self._telemetry.message(f"{worker} was sent the revision again: {reason}")

    def unplaced(self, worker: str, seconds: float, at_work: int) -> None:
        self._telemetry.message(
            f"{worker} has waited {seconds:g} s for free resources and still waits; {at_work} of its pool are working"
        )

    def lost(self, worker: str, reason: str, replacement: str, requeued: int, process: Process) -> None:
        self._telemetry.lost(worker)
        after = f"{replacement} takes its place" if replacement else "it was leaving"
        if not process.name:
            self._telemetry.message(f"{worker} was lost ({reason}); {after}", "lost")
        elif not process.told:
            process.told = True
            roles = listed(process.roles)
            self._telemetry.message(
                f"{process.name} was lost ({reason}), and with it {roles}; a new process takes its place",
                "lost",
            )
        if requeued:
            self._telemetry.message(f"{requeued} units of {worker} go to others", "lost")
        self.changed()

    def unfit(self, worker: str, reason: str) -> None:
        name = pool_of(worker)
        left = self._targets.give_up(name)
        self._telemetry.message(
            f"{worker} cannot work with the others and was removed ({reason}); {left} {name} go on, and "
            f"`solrl pool scale --{name} {left + 1}` tries again",
            "lost",
        )
        self.changed()

    def left(self, worker: str) -> None:
        self._telemetry.message(f"{worker} has left")
        self.changed()

    def changed(self) -> None:
        """Update the displayed worker states soon."""
        if not self._shows:
            self._shows = True
            asyncio.get_running_loop().call_later(SHOW_SECONDS, self._show)

    # Internals

    def _resize(self) -> None:
        for name, pool in self._pools.items():
            for worker in pool.resize(self._targets.wanted(name)):
                self._telemetry.message(f"{worker} leaves after its present units")

    def _retire(self, worker: str, reason: str) -> None:
        self._pools[pool_of(worker)].retire(worker, reason)

    async def _watch_nodes(self) -> None:
        """Drain and replace workers on draining nodes before they are lost."""
        warned, seconds = False, self._config.fleet.deadlines.fetch
        while True:
            nodes = await self._world.blocking(self._world.draining_nodes, "reading which nodes are draining", seconds)
            if self._world.node in nodes and not warned:
                warned = True
                affected = ["the controller", "the selector", *["the text encoders"] * encodes_here(self._config.fleet)]
                self._telemetry.message(
                    f"the node of the run folder is leaving, and with it {listed(affected)}: continue with --resume "
                    "once the run has ended",
                    "lost",
                )
            for pool in self._pools.values():
                for name, successor in pool.leave_nodes(nodes):
                    self._telemetry.message(f"the node of {name} is leaving: {successor} replaces it")
            await asyncio.sleep(NODES_SECONDS)

    def _show(self) -> None:
        self._shows = False
        roles = {EXPLORER: self.explorers, REGENERATOR: self.regenerators}
        workers = [worker for pool in self._pools.values() for worker in pool.workers.values()]
        self._telemetry.workers(
            {worker.name: worker.describe() for worker in workers},
            census={role: pool.census() for role, pool in roles.items()},
            tiers={role: pool.tiers() for role, pool in roles.items()},
            replacements_left=self.replacements.left,
        )
        done, shapes = (sum(counts) for counts in zip(*(p.warmed() for p in self._pools.values()), strict=True))
        if shapes:
            self._telemetry.stage("warm up", done, shapes)
