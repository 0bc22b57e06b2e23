"""All pools together: who is there, what they hold, and the proofs that they hold it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import ray

from actors.cluster import capacity, wait
from actors.fleet.actor_factory import ActorFactory
from actors.fleet.budget import Budget
from actors.fleet.events import Done, Event, Left, Lent, Loaded, Lost, Refused, Started, Unfit, Unplaced, Warmed, Work
from actors.fleet.lender import Lender
from actors.fleet.pool import Pool
from actors.monitoring.telemetry import Telemetry
from solrl_ray.config.pools import explorer_pools, pools
from solrl_ray.config.schema import Config
from solrl_ray.config.sharing import shares
from solrl_ray.config.strategies import is_one_stage, pool_sampling
from solrl_ray.errors import RunError
from solrl_ray.records import Attestation, WorkUnit
from solrl_ray.scheduling.hedging import Hedging
from solrl_ray.scheduling.scaling import Targets, option
from solrl_ray.scheduling.strikes import Strikes
from solrl_ray.scheduling.waits import Waits
from solrl_ray.scheduling.worker_state import State, leavers, pool_of, role_of, worker_name
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publication
from solrl_ray.weight_sync.receipts import ReceiptBook

LOOK_SECONDS = 2.0
"""Between two looks at which nodes are about to go, and at who is still there of those who have nothing to do."""

SHOW_SECONDS = 0.2
"""Between two tellings of who does what, if only units were answered."""

LENT_POLL = 0.1
"""How often a loan is looked after while nothing else goes on, seconds."""


class Fleet:
    def __init__(
        self,
        config: Config,
        cast: ActorFactory,
        telemetry: Telemetry,
        lender: Lender | None = None,
        *,
        explores: bool = True,
    ) -> None:
        """`lender`: of regenerators, if this fleet lends any; `explores`: whether it has explorers."""
        self._config = config
        self._telemetry = telemetry
        self._lender = lender
        self._receipts = ReceiptBook()
        self._first: dict[Pool, Attestation] = {}
        self._counts: dict[str, float] = {}
        self._targets = Targets(config, explores=explores)
        self._next = dict.fromkeys(pools(config.fleet), 0)
        self._looked = self._shown = 0.0
        self._here, self._warned = ray.get_runtime_context().get_node_id(), False
        self._strikes = Strikes(config.fleet.strikes)
        self._waits = Waits()
        self._cast = cast
        self._tier = ""
        """Of the explorers."""
        self.budget = budget = Budget(config.fleet.max_replacements)
        deadlines = config.fleet.deadlines
        unit_seconds = deadlines.regenerate if is_one_stage(config) else deadlines.explore
        exploring = explorer_pools(config.fleet)
        self.explorers = {name: self._pool(cast.explorer, unit_seconds, budget) for name in exploring}
        """By name, as in `config.pools`: within one of them everybody answers with the same bits."""
        self.regenerators = self._pool(cast.regenerator, deadlines.regenerate, budget)
        self._pools = {**self.explorers, "regenerators": self.regenerators}
        self._hedging = {pool: Hedging(config.fleet.hedge) for pool in self._pools.values()}

    def open(self) -> None:
        """Spawn every worker; nobody is waited for."""
        self._resize()

    def scale(self, sizes: Mapping[str, int]) -> str:
        """Have pools of other sizes from the next events on; their names: `config.pools`.

        The only method for other threads. Returns what will happen, in sentences. Raises UserError for sizes out of
        bounds.
        """
        said = self._targets.ask(sizes)
        fits = capacity.survey(self._targets.applied(self._config))
        lacking = [f"{entry.missing} of {entry.request.key}" for entry in fits if entry.missing]
        said += f"\nno room for {' and '.join(lacking)} now: they wait until there is" if lacking else ""
        for sentence in said.splitlines():
            self._telemetry.message(sentence)
        return said

    def publish(self, role: str, publication: Publication, probe: Any) -> None:
        """Have everybody of a role load a revision; each worker counts again only after its receipt.

        Args:
            role: ``explorer`` or ``regenerator``.
            probe: reference of the prompt embedding of the probe forward.
        """
        if self._lender is not None and role == REGENERATOR:
            self._lender.reopen()
        manifest = publication.revision.manifest
        self._receipts.expect(manifest)
        parcel = PayloadRefs(publication, role)
        if role == EXPLORER:
            self._counts = {
                "bytes": float(parcel.size()),
                "snapshot": float(publication.kind == "snapshot"),
                "bumped": float(len(manifest.bumped)),
                "resyncs": 0.0,
                "load_seconds": 0.0,
            }
        for pool in self.explorers.values() if role == EXPLORER else [self.regenerators]:
            pool.publish(
                publication.name,
                lambda handle, full: handle.load_revision.remote(parcel.ref(full=full), probe, full),
                warm_up=lambda handle, shape: handle.warm_up.remote(shape, probe),
                chained=role == EXPLORER and publication.kind == "delta",
            )

    def explore_as(self, config: Config) -> None:
        """Have explorers be those of `config`, which may be another level of the fallback ladder.

        For another tier all of them start anew, in other score classes. No unit of theirs may be at work then.
        """
        tier = pool_sampling(config).tier
        if tier == self._tier:
            return  # more steps are said with each unit
        self._cast.explore_with(config)
        self._tier = tier
        for pool in self.explorers.values():
            self._first.pop(pool, None)
            pool.renew()

    def release_gpu_cache(self) -> list[Work]:
        """Before the learner's turn on a shared GPU: wait until those who share have given back what they keep there.

        Who does not answer in time is replaced, so its memory is free as well. Returns what else happened meanwhile.
        """
        happened: list[Work] = []
        if self._lender is not None:
            self._lender.close()
            while self._lender.lent:
                happened += self.events(seconds=1.0, needed=False)
        for name, worker in pools(self._config.fleet).items():
            if shares(worker):
                self._pools[name].release_gpu_cache()
        while any(pool.resting for pool in self._pools.values()):
            happened += self.events(seconds=1.0)
        return happened

    @property
    def score_class(self) -> str:
        """What fixes the bits that all pools answer with; empty until a worker of each has started."""
        if len(self._first) < len(self._pools):
            return ""
        return "/".join(self._first[pool].score_class for pool in self._pools.values())

    @property
    def publication_counts(self) -> dict[str, float]:
        """What became of the explorers' newest revision so far: see `IterationMetrics.publication`."""
        return dict(self._counts)

    @property
    def at_work(self) -> bool:
        """Whether anybody has a call in flight, or may be lent, so that something will happen."""
        return self._lends or self._leaving or any(pool.refs() for pool in self._pools.values())

    @property
    def _lends(self) -> bool:
        return self._lender is not None and self._lender.active

    @property
    def _leaving(self) -> bool:
        return any(pool.leaving for pool in self._pools.values())

    def waited_for_weights(self, began: float) -> float:
        """Share of the explorers' time since `began`, by the monotonic clock, in which they waited for weights."""
        workers = sum(sum(pool.roll.census().values()) for pool in self.explorers.values())
        return self._waits.share(began=began, ended=time.monotonic(), workers=workers)

    def held(self) -> list[tuple[str, WorkUnit]]:
        """Worker and unit of everything at work in all pools."""
        return [held for pool in self._pools.values() for held in pool.held()]

    def events(self, *, seconds: float, needed: bool = True) -> list[Work]:
        """What happened in all pools, waiting at most `seconds` for something to.

        Args:
            needed: whether the caller waits for units, so that nobody at work is an error.

        Raises:
            RunError: receipts that disagree, workers of different score classes, all replacements used up, a worker's
                own error, or nobody at work.
        """
        self.adjust()
        lends = self._lends  # a loan may end in the next line, and its worker has no call in flight then
        if self._lender is not None:
            self._lender.tick(self.regenerators)
        refs = [ref for pool in self._pools.values() for ref in pool.refs()]
        awaited = any(pool.awaited for pool in self._pools.values()) or self._leaving
        if needed and not (awaited or lends or self._lends):
            raise RunError("no worker has a call in flight, yet the work is not done")
        if not refs and not self._leaving:
            time.sleep(min(seconds, LENT_POLL))
            return []
        ready = set(wait.first_ready(refs, seconds=seconds))
        happened: list[Event] = []
        for pool in self._pools.values():
            for event in pool.settle(ready):
                self._note(pool, event)
                happened.append(event)
        self._show(anyway=not all(isinstance(event, Done) for event in happened))
        return [event for event in happened if isinstance(event, Work)]

    def _show(self, *, anyway: bool) -> None:
        """Tell who does what, now and then: it takes a look at every worker."""
        now = time.monotonic()
        if now - self._shown < SHOW_SECONDS and not anyway:
            return
        self._shown = now
        roles = {EXPLORER: list(self.explorers.values()), REGENERATOR: [self.regenerators]}
        self._telemetry.workers(
            {name: words for pool in self._pools.values() for name, words in pool.roll.states().items()},
            census={role: _sum(pool.roll.census() for pool in its) for role, its in roles.items()},
            tiers={role: _sum(pool.roll.tiers() for pool in its) for role, its in roles.items()},
            replacements_left=self.budget.left,
        )

    def hedges(self, pool: Pool) -> list[tuple[str, WorkUnit]]:
        """Idle workers of a pool in which nothing waits, and late units of others that they could do as well."""
        idle = pool.roll.idle()
        return self._hedging[pool].pairs(idle, pool.roll.out()) if idle else []

    def refuse(self, worker: str, unit: WorkUnit, reason: str) -> Lost | None:
        """A strike against a worker whose answer cannot be right; the loss, if it is retired.

        Raises RunError if the run is at fault, or all replacements are used up.
        """
        pool = self._pools[pool_of(worker)]
        count, limit = self._strikes.refuse(worker, unit.id, reason, alone=pool.roll.at_work <= 1), self._strikes.limit
        self._telemetry.struck(worker)
        self._telemetry.message(f"{unit.id} is done again; strike {count} of {limit} for {worker}: {reason}")
        lost = pool.retire(worker, f"strike {count}: {reason}") if count >= limit else None
        if lost is not None:
            self._note(pool, lost)
        return lost

    def adjust(self) -> None:
        """Follow what was asked for with `scale`, leave nodes that are about to go, and see who is there."""
        self._resize()
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._leave_nodes()
            for pool in self._pools.values():
                pool.ping()

    def _resize(self) -> None:
        """Open or drain workers until the pools have their sizes."""
        for name, pool in self._pools.items():
            lives = pool.roll.lives()
            staying = sum(state is not State.DRAINING for state in lives.values())
            for _ in range(self._targets.wanted(name) - staying):
                pool.open(worker_name(name, self._next[name]))
                self._next[name] += 1
            for worker in leavers(lives, staying - self._targets.wanted(name)):
                pool.drain(worker)
                self._telemetry.message(f"{worker} leaves after what it holds")

    def _leave_nodes(self) -> None:
        """Have workers leave nodes that are about to go, before they are lost."""
        nodes = capacity.draining()
        if self._here in nodes and not self._warned:
            self._warned = True
            self._telemetry.message(
                "the node of the run folder is about to go, and with it controller, selector and encoder: "
                "go on with --resume"
            )
        for pool in self._pools.values():
            for name, successor in pool.move(nodes):
                self._telemetry.message(f"the node of {name} is about to go: it leaves, {successor} takes its place")

    def _note(self, pool: Pool, event: Event) -> None:
        if isinstance(event, Started):
            self._admit(pool, event.attestation)
        elif isinstance(event, Warmed):
            self._show_warm_up()
        elif isinstance(event, Loaded):
            self._receipts.check(event.receipt)
            self._telemetry.proved(event.receipt, waited=event.waited)
            if event.receipt.role == EXPLORER:
                self._waits.add(event.waited, until=time.monotonic())
                self._counts["load_seconds"] = max(self._counts["load_seconds"], event.receipt.seconds)
        elif isinstance(event, Lent) and self._lender is not None:
            self._lender.given()
        elif isinstance(event, Refused):
            self._counts["resyncs"] += 1
            self._telemetry.message(f"{event.worker} was sent the whole revision: {event.reason}")
        elif isinstance(event, Done):
            self._strikes.answered(event.worker)
            self._hedging[pool].answered(event.unit, event.value.seconds)
            self._telemetry.unit(event.worker, event.unit, event.value.started, event.value.seconds)
        elif isinstance(event, Lost | Unfit | Left | Unplaced):
            self._miss(pool, event)

    def _miss(self, pool: Pool, event: Lost | Unfit | Left | Unplaced) -> None:
        if isinstance(event, Lost):
            self._telemetry.lost(event.worker)
            after = f"{event.replacement} takes its place" if event.replacement else "it was leaving"
            self._telemetry.message(f"{event.worker} was lost ({event.reason}); {after}")
        elif isinstance(event, Unfit):
            name = pool_of(event.worker)
            left = self._targets.give_up(name)
            self._telemetry.message(
                f"{event.worker} cannot work with the others and has gone ({event.reason}); {left} {name} go on, and "
                f"`solrl pool scale {option(name, left + 1)}` tries once more"
            )
        elif isinstance(event, Left):
            self._telemetry.message(f"{event.worker} has left")
        else:
            self._telemetry.message(
                f"{event.worker} has found no place for {event.seconds:g} s, and waits; at work: {pool.roll.at_work}"
            )

    def _show_warm_up(self) -> None:
        done, shapes = (sum(n) for n in zip(*(pool.roll.warmed() for pool in self._pools.values()), strict=True))
        if shapes:
            self._telemetry.stage("warm up", done, shapes)

    def _admit(self, pool: Pool, attested: Attestation) -> None:
        """Take a worker that has started, or send it away if it would answer a unit with other bits than its pool.

        Else a unit's result would depend on who takes it. Raises RunError if nobody of the pool is at work yet.
        """
        if attested.warm_ups and pool not in self._first:
            self._telemetry.message(
                f"{role_of(attested.worker)}s compile their forward for {attested.warm_ups} shapes before "
                "they work: minutes, unless compile.cache has them"
            )
        first = self._first.setdefault(pool, attested)
        if attested.score_class == first.score_class:
            self._telemetry.attested(attested)
            self._show_warm_up()
            return
        reason = (
            f"{attested.worker} and {first.worker} would score a unit differently: one computes {attested.tier} "
            f"on {attested.device} (score class {attested.score_class}), the other {first.tier} on "
            f"{first.device} (score class {first.score_class}); workers of one pool must be alike"
        )
        if not pool.has_proved(attested.worker):
            raise RunError(reason)
        self._note(pool, pool.dismiss(attested.worker, reason))

    def _pool(self, spawn: Callable[[str], Any], unit_seconds: float, budget: Budget) -> Pool:
        return Pool(
            spawn,
            unit_seconds=unit_seconds,
            max_inflight=self._config.fleet.max_inflight,
            deadlines=self._config.fleet.deadlines,
            budget=budget,
        )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts of several pools together."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


class PayloadRefs:
    """A publication's payloads for one role, each put into the object store once, when it is first asked for."""

    def __init__(self, publication: Publication, role: str) -> None:
        self._publication = publication
        self._role = role
        self._refs: dict[bool, Any] = {}
        self._sizes: dict[bool, int] = {}

    def ref(self, *, full: bool) -> Any:
        full = full and self._publication.has_whole(self._role)
        if full not in self._refs:
            content = self._publication.payload(self._role, full=full)
            self._sizes[full] = len(content)
            # An array is read where it lies in the object store; bytes would be copied into each worker.
            self._refs[full] = ray.put(np.frombuffer(content, np.uint8))
        return self._refs[full]

    def size(self) -> int:
        """Bytes of the payload for workers that hold the revision before."""
        self.ref(full=False)
        return self._sizes[False]
