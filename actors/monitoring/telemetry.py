"""Collects and writes all measurements of a live run: progress and time left for the terminal, events, metrics.jsonl,
TensorBoard, attestations, the metrics of `solrl_ray.metrics.instruments`, the spans of the timeline, and trackers.

One task writes the files, in order, without delaying the run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actors.monitoring.tracking import Tracking
from actors.world import MetricsWriter, World, on_disk
from solrl_ray.common.files import replace_file
from solrl_ray.config.problems import listed
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.evaluation import stability
from solrl_ray.metrics.records import (
    EvaluationMetrics,
    Event,
    EventKind,
    IterationMetrics,
    Progress,
    added,
    measured_seconds,
)
from solrl_ray.records import Attestation, Receipt, WorkUnit
from solrl_ray.report.data import read_attestations
from solrl_ray.report.trace import UNIT_STAGES, Span, TraceWriter
from solrl_ray.rollout import constant_rewards, low_fidelity
from solrl_ray.scheduling.worker_state import role_of
from solrl_ray.storage.run_folder import EventLog, RunFolder

EXPORTED = ("reward_mean", "proxy_reward_mean", "loss", "policy_loss", "kl", "gradient_norm")
"""Fields of `IterationMetrics` that are exported as gauges, as ``solrl_`` and the name of the field."""
TOKENS = ("prompt_tokens", "completion_tokens")
"""Keys of `IterationMetrics.reward_costs` that count tokens."""
LAST_EVENTS_SECONDS = 5.0
NOTE_SECONDS = 15.0
"""Seconds after which an actor's note expires unless it is repeated."""


class Telemetry:
    def __init__(self, config: Config, folder: RunFolder, world: World) -> None:
        self._config = config
        self._folder = folder
        self._world = world
        self._on_disk = partial(on_disk, world, config, folder.path)
        self._writes: deque[tuple[Callable[[], None], str]] = deque()
        """Pending writes, each with its name for errors."""
        self._requested, self._idle = asyncio.Event(), asyncio.Event()
        self._started = world.now()
        self._before = 0.0
        """Wall seconds that the run took before this process started."""
        self._state = "starting"
        self._iteration = 0
        self._stages: dict[str, tuple[int, int]] = {}
        self._workers: dict[str, str] = {}
        self._notes: dict[str, tuple[str, float]] = {}
        """Actor → its note, and the time at which the note expires."""
        self._doing: dict[str, tuple[Span, float]] = {}
        """Actor → open span of the work in its note, and its start by `World.now`."""
        self._events = EventLog(folder)
        self._attestations: dict[tuple[str, str, str], Attestation] = {}
        """Worker, device and score class → attestation."""
        self._writers: list[MetricsWriter] = []
        self.iterations: list[IterationMetrics] = []
        self.evaluations: list[EvaluationMetrics] = []
        self._measured_here = self._evaluated_before = 0
        self._spans: TraceWriter | None = None
        self._stage: tuple[Span, float] | None = None
        """Open span of the current stage and its start by `World.now`; None if the timeline does not show the stage."""
        self._lost: Counter[str] = Counter()
        self._struck: Counter[str] = Counter()
        self._tiers: set[tuple[str, str]] = set()
        """Pairs of role and tier that were attested so far."""
        self._exporter = world.exporter(config.run.name)
        self.tracking = Tracking(config, folder.path, world, self.message)

    async def resume(self, iterations: list[IterationMetrics], evaluations: list[EvaluationMetrics]) -> None:
        """Take over measurements and attestations from before a resume; open trace.json and the TensorBoard files."""
        self.iterations, self.evaluations = list(iterations), list(evaluations)
        self._evaluated_before = len(evaluations)
        self._before = measured_seconds(iterations, evaluations)
        self._iteration = len(iterations)
        path, file = self._folder.path, self._attestations_file
        self._spans = await self._on_disk(lambda: TraceWriter(path), "opening trace.json")
        self._writers = await self._on_disk(
            lambda: self._world.metrics_writers(path, self._iteration), "opening tensorboard/"
        )
        for attestation in await self._on_disk(lambda: read_attestations(file), "reading attestations.json"):
            self._keep(attestation)

    def state(self, words: str, *, stage: str = "") -> None:
        """Set the displayed state, and begin its stage in the timeline; ends the previous stage.

        `stage`: empty if the timeline does not show this state.
        """
        if self._stage is not None:
            self._end(self._stage)
        self._stage = self._begin(kind="stage", name=words, stage=stage) if stage else None
        self._state = words

    def waits_for(self, what: str) -> None:
        """Add to the displayed state what it is waiting for."""
        self._state = f"{self._state.partition(': ')[0]}: waiting for {what}"

    def begin_iteration(self, iteration: int) -> None:
        self._iteration = iteration
        self._stages = {}
        # In every iteration: Ray does not export values that are set just after the start of a process.
        self._exporter.set("solrl_iteration", iteration)
        self._exporter.set("solrl_iterations_planned", self._config.run.iterations)

    def stage(self, name: str, done: int, total: int) -> None:
        self._stages[name] = (done, total)
        self._exporter.set("solrl_stage_done", done, stage=name)
        self._exporter.set("solrl_stage_planned", total, stage=name)

    def unit(self, worker: str, unit: WorkUnit, started: float, seconds: float) -> None:
        """A worker has answered a unit. `started`: start of the work in seconds since 1970; `seconds`: its duration."""
        span = Span(
            kind="unit",
            name=unit.id,
            stage=unit.stage,
            iteration=unit.iteration,
            started=started,
            seconds=seconds,
            worker=worker,
        )
        self._record(span)
        self._exporter.observe("solrl_unit_seconds", seconds, stage=UNIT_STAGES[unit.stage])

    def workers(
        self,
        states: dict[str, str],
        *,
        census: dict[str, dict[str, int]],
        tiers: dict[str, dict[str, int]],
        replacements_left: int,
    ) -> None:
        """Set the displayed and exported states of all workers.

        Args:
            states: worker → its unit or state, in words.
            census: role → state → number of workers.
            tiers: role → tier → number of workers that attested it.
        """
        self._workers = states
        self._exporter.set("solrl_replacements_left", replacements_left)
        for role, counts in census.items():
            self._exporter.set("solrl_workers_lost", self._lost[role], role=role)
            self._exporter.set("solrl_refused_answers", self._struck[role], role=role)
            for state, count in counts.items():
                self._exporter.set("solrl_workers", count, role=role, state=state)
        self._tiers |= {(role, tier) for role, counts in tiers.items() for tier in counts}
        for role, tier in self._tiers:  # includes tiers without a worker now, which are set to 0
            self._exporter.set("solrl_attested_workers", tiers[role].get(tier, 0), role=role, tier=tier)

    def note(self, actor: str, words: str) -> None:
        """Set an actor's note about its current long call, also as a span of the timeline; empty: the call ended."""
        self._notes.pop(actor, None)
        before = self._doing.pop(actor, None)
        if before is not None and before[0].name != words:
            self._end(before)
            before = None
        if words:
            self._doing[actor] = before or self._begin(kind="work", name=words, stage="start", worker=actor)
            self._notes[actor] = words, self._world.now() + NOTE_SECONDS

    def lost(self, worker: str) -> None:
        self._notes.pop(worker, None)
        self._doing.pop(worker, None)
        self._lost[role_of(worker)] += 1

    def struck(self, worker: str) -> None:
        self._struck[role_of(worker)] += 1

    def proved(self, receipt: Receipt, *, waited: float) -> None:
        """A worker's receipt was accepted after it had waited `waited` seconds for the weights."""
        self._exporter.add("solrl_receipts", 1, role=receipt.role)
        self._exporter.set("solrl_revision", receipt.revision, role=receipt.role)
        self._exporter.observe("solrl_weights_wait_seconds", waited, role=receipt.role)

    def message(self, text: str, kind: EventKind = "note") -> None:
        """Record an event, such as a lost worker, a replacement or a requeued unit, and write it to events.jsonl."""
        if kind == "note" and text.startswith("warning: "):
            kind = "warning"
        self._events.all.append(Event.now(self._iteration, kind, text))
        self._write(self._events.store, "writing events.jsonl")

    @asynccontextmanager
    async def last_events(self) -> AsyncIterator[None]:
        """Context that writes the last events to disk before it passes on an error, as far as the disk permits."""
        try:
            yield
        except Exception:
            with suppress(RunError, OSError):
                await self._world.blocking(self._events.store, "writing the last events", LAST_EVENTS_SECONDS)
            raise

    def attested(self, attestation: Attestation) -> None:
        """Record the arithmetic that a worker really runs, for the report (design law 5)."""
        self._keep(attestation)
        content = json.dumps([asdict(a) for _, a in sorted(self._attestations.items())], indent=2)
        self._write(lambda: replace_file(self._attestations_file, content.encode()), "writing attestations.json")

    def _keep(self, attestation: Attestation) -> None:
        """Store an attestation. After a resume, a worker's name may occur again: its earlier attestation is kept if the
        device or score class differs.
        """
        self._attestations[attestation.worker, attestation.device, attestation.score_class] = attestation

    @property
    def _attestations_file(self) -> Path:
        return self._folder.path / "attestations.json"

    def iteration(self, metrics: IterationMetrics) -> None:
        """Record the metrics of a finished iteration, with its alarms: in files, trackers and exported metrics."""
        metrics = replace(metrics, alarms=stability.alarms(self.iterations, metrics))
        if news := stability.news(self.iterations, metrics):
            self.message(f"warning: {news}")
        self.iterations.append(metrics)
        if news := constant_rewards.news(self._config, self.iterations):
            self.message(f"warning: iteration {metrics.iteration + 1}: {news}")
        if news := low_fidelity.news(self._config, self.iterations):
            self.message(f"warning: {news}")
        self._measured_here += 1
        self._write_record(metrics, lambda writer: writer.iteration(metrics))
        self.tracking.bring(lambda writer: writer.iteration(metrics))
        self._export(metrics)

    def evaluation(self, metrics: EvaluationMetrics, pictures: list[list[torch.Tensor]]) -> None:
        metrics = replace(metrics, fall=stability.fall(self.evaluations, metrics))
        if metrics.fall:
            self.message(f"warning: {stability.describe_fall(metrics)}", "collapse")
        self._write_record(metrics, lambda writer: writer.evaluation(metrics, pictures))
        self.tracking.bring(lambda writer: writer.evaluation(metrics, pictures))
        self.evaluations.append(metrics)
        if metrics.policy == "ema":
            self._exporter.set("solrl_alarm", bool(metrics.fall), measure="heldout_reward")
        self._exporter.set("solrl_heldout_reward_mean", metrics.reward_mean, policy=metrics.policy)
        self._export_sums()

    def progress(self, since: int = 0) -> Progress:
        """A snapshot of the progress, with this process's events from index `since`; negative: the newest ones."""
        return Progress(
            run=self._config.run.name,
            state=self._state,
            iteration=self._iteration,
            iterations=self._config.run.iterations,
            stages=dict(self._stages),
            train_rewards=tuple(m.reward_mean for m in self.iterations),
            heldout=tuple((e.iteration, e.policy, e.reward_mean, e.reward_stderr) for e in self.evaluations),
            spearman=tuple(m.spearman for m in self.iterations if m.spearman is not None),
            workers=dict(self._workers),
            notes={actor: words for actor, (words, until) in self._notes.items() if self._world.now() < until},
            events=tuple(self._events.all[since:]),
            alarm=stability.alarm(self.iterations, self.evaluations),
            elapsed=self._before + self._world.now() - self._started,
            remaining=self._remaining(),
        )

    def _remaining(self) -> float | None:
        """Estimated seconds left: mean of this process's last five iterations, plus a final evaluation as long as the
        first one. None before the first iteration.
        """
        if not self._measured_here:
            return None
        recent = [m.seconds["total"] for m in self.iterations[-min(5, self._measured_here) :]]
        left = self._config.run.iterations - len(self.iterations)
        last = next((e.seconds for e in self.evaluations if e.policy == "base"), 0.0)
        return left * sum(recent) / len(recent) + last

    async def written(self) -> None:
        """Return once all pending writes are on disk."""
        while self._writes:
            self._idle.clear()
            await self._idle.wait()  # each write has its deadline

    async def close(self) -> None:
        """Write everything that is pending, close files and trackers, and set the state ``done``."""
        self.state("writing the last metrics")
        await self.written()
        if open_trackers := self.tracking.open:
            self.state(f"bringing the last metrics to {listed(open_trackers)}")
        await self.tracking.close()
        await self._on_disk(self._close_files, "closing tensorboard/ and trace.json")
        self.state("done")

    def _close_files(self) -> None:
        for writer in self._writers:
            writer.close()
        if self._spans is not None:
            self._spans.close()
            self._spans = None

    def _write_record(
        self, record: IterationMetrics | EvaluationMetrics, write_to: Callable[[MetricsWriter], None]
    ) -> None:
        def work() -> None:
            self._folder.append_metrics(record)
            for writer in self._writers:
                write_to(writer)

        self._write(work, "writing metrics")

    def _write(self, work: Callable[[], None], what: str) -> None:
        self._writes.append((work, what))
        self._requested.set()

    async def keep_writing(self) -> None:
        """Write queued data until it is cancelled; runs as a task."""
        while True:
            self._requested.clear()
            while self._writes:
                together = list(self._writes)  # all pending writes in one thread
                works = [work for work, _ in together]
                await self._on_disk(lambda: [work() for work in works], together[0][1])  # noqa: B023
                for _ in together:
                    self._writes.popleft()
            self._idle.set()
            await self._requested.wait()

    def _export(self, metrics: IterationMetrics) -> None:
        exporter = self._exporter
        exporter.add("solrl_candidates", metrics.candidates)
        exporter.add("solrl_samples", metrics.samples)
        measured = self.iterations[-self._measured_here :]
        exporter.set("solrl_iteration", metrics.iteration + 1)
        exporter.set("solrl_dropped", sum(m.dropped for m in measured))
        exporter.set("solrl_requeued_units", sum(m.requeued_units for m in measured))
        exporter.set("solrl_weights_wait_share", metrics.weights_wait)
        exporter.set("solrl_seconds_left", self._remaining() or 0.0)
        if metrics.spearman is not None:  # None without previews
            exporter.set("solrl_rank_fidelity", metrics.spearman)
        for name in EXPORTED:
            exporter.set(f"solrl_{name}", getattr(metrics, name))
        for name in stability.MEASURES:
            exporter.set("solrl_alarm", name in metrics.alarms, measure=name)
        for stage, seconds in metrics.seconds.items():
            exporter.set("solrl_stage_seconds", seconds, stage=stage)
        self._export_sums()

    def _export_sums(self) -> None:
        """Export sums over this process's iterations and evaluations: repeated results, and use of reward servers."""
        first, evaluated = len(self.iterations) - self._measured_here, self._evaluated_before
        iterations = self.iterations[first:]
        self._exporter.set("solrl_duplicate_results", sum(m.duplicate_results for m in iterations))
        self._exporter.set("solrl_differing_results", sum(m.differing_results for m in iterations))
        measured: list[IterationMetrics | EvaluationMetrics] = [*iterations, *self.evaluations[evaluated:]]
        costs = added(m.reward_costs for m in measured)
        self._exporter.set("solrl_reward_requests", costs.get("requests", 0))
        self._exporter.set("solrl_reward_retries", costs.get("retries", 0))
        self._exporter.set("solrl_reward_tokens", sum(costs.get(name, 0) for name in TOKENS))

    def _begin(self, **what: Any) -> tuple[Span, float]:
        return Span(iteration=self._iteration, started=time.time(), seconds=0.0, **what), self._world.now()

    def _end(self, begun: tuple[Span, float]) -> None:
        span, since = begun
        self._record(replace(span, iteration=self._iteration, seconds=self._world.now() - since))

    def _record(self, span: Span) -> None:
        spans = self._spans
        if spans is not None:
            self._write(lambda: spans.write(span), "writing trace.json")
