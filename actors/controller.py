"""The controller: sequences a run. One page to read; every decision is made elsewhere.

::

    evaluate base ─► iteration: choose prompts ─► embed ─► explore ∥ select ∥ regenerate ─► learn ─► save
                        ▲                                                                        │
                        └───────────────────────── publish revision + 1 ◄────────────────────────┘
                  ─► evaluate EMA ─► LoRA file, summary, report
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors import waiting
from actors.devices import takes_turns
from actors.evaluator import Evaluator
from actors.fleet import Fleet
from actors.learner_group import LearnerGroup
from actors.lender import Lender
from actors.roles import Cast, Roles
from actors.rollout import RolledOut, Rollout
from actors.selector_client import SelectorClient
from actors.telemetry import Telemetry
from solrl_ray import models, report
from solrl_ray.checkpoints import Uploader, newest_state
from solrl_ray.config.families import is_one_stage, pool_sampling, warnings
from solrl_ray.config.schema import Config
from solrl_ray.learning.learner import UpdateMetrics
from solrl_ray.metrics import Progress
from solrl_ray.policy.digest import lora_digest
from solrl_ray.policy.saving import save_lora
from solrl_ray.prompts import choose, read_prompts
from solrl_ray.records import Prompt
from solrl_ray.resuming import ResumePoint, resume_point
from solrl_ray.revisions.publication import Publications
from solrl_ray.revisions.store import RevisionStore
from solrl_ray.run_folder import RunFolder
from solrl_ray.run_metrics import audit_plan, iteration_metrics
from solrl_ray.scheduling.book import IterationPlan
from solrl_ray.scheduling.lending import Loan

REVISIONS_KEPT = 2


class Controller:
    def __init__(self, config: Config, folder: Path, roles: Roles) -> None:
        self._config = config
        self._folder = RunFolder(folder)
        self._telemetry = Telemetry(config, self._folder)
        self._cast = Cast(config, folder, roles)
        self._lender = Lender(config, self._telemetry.message)
        self._store = RevisionStore(folder / "revisions")
        upload = bool(config.checkpoints.upload)
        self._uploader = Uploader(folder, config.checkpoints, self._telemetry.message) if upload else None
        self._publications = Publications(config.publish)
        self._train = read_prompts(config.prompts.train)
        self._heldout = read_prompts(config.prompts.heldout)[: config.evaluation.prompts]
        self._embeddings: dict[str, Any] = {}
        self._began = self._published = time.monotonic()
        self._checkpoint_seconds = 0.0

    def __repr__(self) -> str:
        """What Ray shows in its dashboard and before each line that this process logs."""
        run = self._config.run
        return f"controller of {run.name}, {run.iterations} iterations"

    def progress(self) -> Progress:
        """A snapshot; answers from another thread while `run` is at work."""
        return self._telemetry.progress()

    def borrow(self, request: str) -> Loan | None:
        """A regenerator for an evaluation from outside, now or at a later call; answers from another thread, too."""
        return self._lender.ask(request)

    def give_back(self, request: str) -> None:
        """The evaluation has what it wanted, or gives up."""
        self._lender.done(request)

    def run(self) -> None:
        """Train from where the run folder ends to `run.iterations`, and write what a user takes home."""
        started = time.monotonic()
        self._folder.lock(seconds=30.0)
        point = resume_point(self._folder, iterations=self._config.run.iterations, init=self._config.run.init)
        self._telemetry.resume(point.iterations, point.evaluations)
        for note in point.notes:
            self._telemetry.message(note)
        self._open(point)
        if point.updates == 0:
            self._evaluate_start()
        else:
            self._evaluate_on_the_way(point.updates)
        self._began = time.monotonic()
        for iteration in range(point.updates, self._config.run.iterations):
            self._iterate(iteration)
            self._evaluate_on_the_way(iteration + 1)
        self._finish(point.seconds + time.monotonic() - started)

    def _open(self, point: ResumePoint) -> None:
        """Spawn every actor at once, then wait for those that the first step needs."""
        self._telemetry.state("starting workers", stage="start")
        for warning in warnings(self._config):
            self._telemetry.message(f"warning: {warning}")
        self._encoder = self._cast.encoder()
        encoding = self._encoder.start.remote()
        self._fleet = Fleet(self._config, self._cast, self._telemetry, self._lender)
        self._fleet.open()
        self._selector = SelectorClient(
            self._cast.selector,
            seconds=self._config.fleet.deadlines.selector,
            budget=self._fleet.budget,
            held=self._fleet.held,
            tell=self._telemetry.message,
        )
        self._learners = LearnerGroup(
            self._cast.learner,
            self._config,
            last_state=lambda: newest_state(self._folder.checkpoints(), self._folder.path)[1],
            budget=self._fleet.budget,
            tell=self._telemetry.message,
            supply=lambda: self._rollout.supply(),
        )
        self._rollout = Rollout(self._config, self._fleet, self._selector, self._telemetry)
        self._evaluator = Evaluator(self._config, self._fleet, self._folder, self._telemetry)
        waiting.get(encoding, what="the start of the encoder", seconds=self._config.fleet.deadlines.start)
        self._probe = self._embed(self._heldout[:1])[self._heldout[0].id]
        self._learners.start(point.state)
        self._publish(point.updates)

    def _iterate(self, iteration: int) -> None:
        config = self._config
        self._telemetry.begin_iteration(iteration)
        self._telemetry.state("sampling" if is_one_stage(config) else "exploring", stage="rollout")
        prompts = choose(self._train, config.run.seed, iteration, config.rollout.prompts)
        embeddings = self._embed(prompts)
        plan = IterationPlan(
            iteration=iteration,
            revision=iteration,
            prompt_ids=tuple(prompt.id for prompt in prompts),
            pool=config.rollout.pool,
            keep=config.rollout.keep,
            micro_batch=pool_sampling(config).micro_batch,
            one_stage=is_one_stage(config),
            policy_digest=self._policy_digest,
            score_class=self._fleet.score_class(),
            audit=audit_plan(config),
        )
        rolled = self._rollout.run(plan, prompts, embeddings)
        self._telemetry.state("learning", stage="learn")
        learning = time.monotonic()
        if takes_turns(config.fleet):
            self._fleet.rest()  # all units are in, so nothing that happens here is anybody's work
        update = self._learners.update(iteration, rolled.groups, [embeddings[p.id] for p in prompts])
        self._commit(iteration, rolled, update, learning)

    def _commit(self, iteration: int, rolled: RolledOut, update: UpdateMetrics, learning: float) -> None:
        """Metrics first, then the checkpoint, which makes the iteration count; then the next revision.

        So an iteration's record begins where the one before ended, with checkpoint and publication of the revision
        that it explores with.
        """
        self._telemetry.state("writing the checkpoint", stage="checkpoint")
        seconds = {"learn": time.monotonic() - learning, "checkpoint": self._checkpoint_seconds}
        explored = rolled.clocks["explore"].first
        if explored is not None:  # None if a resumed run had all candidates already
            seconds["publish"] = explored - max(self._published, self._began)
        state = self._learners.state()
        seconds["total"] = time.monotonic() - self._began
        metrics = iteration_metrics(
            self._config,
            iteration=iteration,
            closed=rolled.closed,
            rewards=rolled.rewards,
            update=update,
            seconds=seconds | {name: clock.wall for name, clock in rolled.clocks.items()},
            busy_seconds={name: clock.busy for name, clock in rolled.clocks.items()} | {"learn": update.seconds},
            factors=state.default,
            publication=self._fleet.publication_counts,
        )
        self._telemetry.iteration(metrics)
        self._began = time.monotonic()
        state.save(self._folder.checkpoint(iteration + 1))
        self._learners.saved()
        self._folder.prune(self._config.checkpoints)
        if self._uploader is not None:
            self._uploader.submit(self._folder.checkpoint(iteration + 1))
        self._checkpoint_seconds = time.monotonic() - self._began
        self._publish(iteration + 1)

    def _publish(self, updates: int) -> None:
        """Make revision `updates` of the sampling policy, store it, and have both pools load it."""
        self._telemetry.state(f"publishing revision {updates}", stage="publish")
        self._published = time.monotonic()
        self._newest = self._publications.publish(self._learners.revision("old"))
        self._policy_digest = lora_digest(self._newest.revision.factors)
        self._store.save(self._newest)
        self._store.prune(keep=REVISIONS_KEPT)
        self._fleet.publish(self._fleet.explorers, self._newest, self._probe)
        self._fleet.publish(self._fleet.regenerators, self._newest, self._probe)

    # Evaluation

    def _evaluate_start(self) -> None:
        """Revision 0 is the base model (LoRA's B is zero), unless the run was warm-started: then both are measured."""
        if self._config.evaluation.reference and not self._evaluated("real", 0):
            self._evaluator.run("real", 0, self._heldout, {})
        if not self._config.run.init:
            if not self._evaluated("base", 0):
                self._evaluator.run("base", 0, self._heldout, self._embed(self._heldout))
            return
        if not self._evaluated("base", 0):
            base = self._publications.publish(self._learners.revision("base"))
            self._fleet.publish(self._fleet.regenerators, base, self._probe)
            self._evaluator.run("base", 0, self._heldout, self._embed(self._heldout), holder="base")
        self._evaluate_ema(0)
        self._fleet.publish(self._fleet.regenerators, self._newest, self._probe)

    def _evaluate_on_the_way(self, updates: int) -> None:
        every = self._config.evaluation.every
        due = every and updates % every == 0 and updates < self._config.run.iterations
        if due and not self._evaluated("ema", updates):
            self._evaluate_ema(updates)
            self._began = time.monotonic()  # evaluation has a record of its own
            self._fleet.publish(self._fleet.regenerators, self._newest, self._probe)

    def _evaluate_ema(self, updates: int) -> None:
        if not self._evaluated("ema", updates):
            average = self._publications.publish(self._learners.revision("ema"))
            self._fleet.publish(self._fleet.regenerators, average, self._probe)
            self._evaluator.run("ema", updates, self._heldout, self._embed(self._heldout))

    def _evaluated(self, policy: str, updates: int) -> bool:
        return any(e.policy == policy and e.iteration == updates for e in self._telemetry.evaluations)

    # The end, and what is shared

    def _finish(self, seconds: float) -> None:
        self._evaluate_ema(self._config.run.iterations)
        self._telemetry.state("writing the report", stage="report")
        model = self._config.model
        convolutions = models.CONVOLUTIONS.get(model.family, ())
        save_lora(self._folder.path / "lora", self._learners.factors("ema"), model.lora, convolutions)
        summary = report.summarize(
            self._config, self._telemetry.iterations, self._telemetry.evaluations, seconds=seconds
        )
        report.write_summary(self._folder.path, summary)
        if self._uploader is not None:
            self._telemetry.state("copying the last checkpoints")
            self._uploader.close(seconds=self._config.fleet.deadlines.upload)
        report.build(self._folder.path)
        self._telemetry.state("done")
        self._telemetry.close()

    def _embed(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Prompt id → reference of its embedding; encoded when first needed, one copy a node."""
        self._embeddings = {p.id: ref for p in prompts if (ref := self._embeddings.get(p.id)) is not None}
        missing = [p for p in prompts if p.id not in self._embeddings]
        refs = {p.id: self._encoder.embed.remote(p) for p in missing}
        seconds = self._config.fleet.deadlines.encode * max(1, len(refs))
        waiting.get(list(refs.values()), what=f"encoding {len(refs)} prompts", seconds=seconds)
        self._embeddings |= refs
        return dict(self._embeddings)
