"""The controller: sequences a run. One page to read; every decision is made elsewhere.

::

    evaluate base ─► iteration: choose prompts ─► embed ─► explore ∥ select ∥ regenerate ─► learn
                        ▲                                                                     │
                        └── save ∥ begin the next iteration ◄── publish revision + 1 ◄────────┘
                  ─► evaluate EMA ─► LoRA file, summary, report

What the learner group does, the making of revisions, and checkpoints happen aside (`actors.cluster.background`), while
this thread looks after the fleet: that begins with the next iteration while the checkpoint is written, and with
`rollout.max_staleness` 1 explores it while the learners are at work. Evaluations on the way go on beside an update
(`actors.evaluation.schedule`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from actors.cluster import capacity
from actors.cluster.background import Background
from actors.dispatch.open_iteration import RolloutResult
from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.dispatch.rollout import Rollout
from actors.dispatch.selector_client import SelectorClient
from actors.evaluation.evaluator import Evaluator
from actors.evaluation.schedule import EvaluationSchedule
from actors.fleet.actor_factory import ActorClasses, ActorFactory
from actors.fleet.fleet import Fleet
from actors.fleet.lender import Lender
from actors.monitoring.telemetry import Telemetry
from actors.training.learner_group import LearnerGroup, UpdateResult
from actors.training.policy_publisher import PolicyPublisher
from solrl_ray import models
from solrl_ray.config.pools import kinds_of_prompts
from solrl_ray.config.schema import Config
from solrl_ray.config.sharing import takes_turns
from solrl_ray.config.strategies import is_one_stage, pool_sampling, warnings
from solrl_ray.learning.state import LearnerState
from solrl_ray.metrics.records import Progress
from solrl_ray.policy.saving import save_lora
from solrl_ray.prompts.prompt_set import choose, read_prompts
from solrl_ray.records import Prompt
from solrl_ray.report.iteration_metrics import audit_plan, iteration_metrics
from solrl_ray.report.page import build
from solrl_ray.report.summary import summarize, write_summary
from solrl_ray.rollout.fallback import FallbackLadder
from solrl_ray.scheduling import placement
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationSummary
from solrl_ray.scheduling.scaling import forgotten
from solrl_ray.scheduling.staleness import may_explore, staleness_of
from solrl_ray.storage.checkpoints import Uploader, newest_state, state_before
from solrl_ray.storage.resume import ResumePoint, resume_point
from solrl_ray.storage.run_folder import RunFolder

T = TypeVar("T")
U = TypeVar("U")


class Controller:
    def __init__(self, config: Config, folder: Path, roles: ActorClasses) -> None:
        self._config = config
        self._folder = RunFolder(folder)
        self._scaling = threading.Lock()
        self._telemetry = Telemetry(config, self._folder)
        self._disk = self._telemetry.disk
        self._cast = ActorFactory(config, folder, roles)
        self.lender = Lender(config, self._telemetry.message)
        self._fleet = Fleet(config, self._cast, self._telemetry, self.lender)
        upload = bool(config.checkpoints.upload)
        self._uploader = Uploader(folder, config.checkpoints, self._telemetry.message) if upload else None
        self._train = read_prompts(config.prompts.train)
        self._heldout = read_prompts(config.prompts.heldout)[: config.evaluation.prompts]
        self._prompts: Callable[[int], Sequence[Prompt]] = lru_cache(maxsize=2)(
            partial(choose, self._train, config.run.seed, count=config.rollout.prompts)
        )
        """Of an iteration; of thousands, they take a while to choose."""
        self._aside: Background[Any] | None = None
        self._max_staleness = config.rollout.max_staleness
        self._ladder = FallbackLadder(config, staleness=self._max_staleness)
        self._began = self._published = time.monotonic()
        self._checkpoint_seconds = 0.0

    def progress(self) -> Progress:
        """A snapshot; answers from another thread while `run` is at work."""
        return self._telemetry.progress()

    def scale(self, sizes: Mapping[str, int]) -> str:
        """Have pools of other sizes; answers from another thread, as `Fleet.scale`."""
        with self._scaling:  # what is noted last is what was asked for last
            said = self._fleet.scale(sizes)
            with self._disk.work("noting the sizes of pools"):
                self._folder.note_sizes(sizes)
        return said

    def run(self) -> None:
        """Train from where the run folder ends to `run.iterations`, and write what a user takes home."""
        started = time.monotonic()
        config = self._config
        with self._disk.work("finding where to go on"):
            self._folder.lock(seconds=30.0)
            point = resume_point(
                self._folder,
                iterations=config.run.iterations,
                init=config.run.init,
                staleness=config.rollout.max_staleness,
            )
            sizes = self._folder.take_sizes()
        self._telemetry.resume(point.iterations, point.evaluations)
        for note in (*point.notes, *forgotten(config, sizes)):
            self._telemetry.message(note)
        self._open(point)
        if point.updates == 0:
            self._held_out.start()
            if config.run.init:
                self._evaluate(0)
        else:
            self._evaluate_on_the_way(point.updates)
        self._began = time.monotonic()
        for iteration in range(point.updates, config.run.iterations):
            self._iterate(iteration)
            self._evaluate_on_the_way(iteration + 1)
        self._evaluate(config.run.iterations)
        self._finish(point.seconds + time.monotonic() - started)

    def _open(self, point: ResumePoint) -> None:
        """Spawn every actor at once, then wait for those that the first step needs."""
        self._telemetry.state("starting workers", stage="start")
        for warning in warnings(self._config):
            self._telemetry.message(f"warning: {warning}")
        self._embeddings = PromptEmbeddings(self._cast.encoder(), self._config.fleet.deadlines)
        self._fleet.explore_as(self._ladder.config(self._fallback_level(point.updates)))
        # Who takes a place first: see `ranks_first`.
        ranks_first = placement.ranks_first(self._config)
        if not ranks_first:
            self._fleet.open()
        self._learners = LearnerGroup(
            self._cast.learner,
            self._config,
            seat=self._cast.seat_learners,
            last_state=self._last_state,
            budget=self._fleet.budget,
            tell=self._telemetry.message,
            supply=self._supply,
        )
        if ranks_first:
            self._fleet.open()
        self._selector = SelectorClient(
            self._cast.selector,
            seconds=self._config.fleet.deadlines.selector,
            budget=self._fleet.budget,
            held=self._fleet.held,
            tell=self._telemetry.message,
        )
        self._rollout = Rollout(self._fleet, self._selector, self._telemetry)
        self._embeddings.await_encoder()
        probe = self._embeddings.of(self._heldout[:1])[self._heldout[0].id]
        self._revisions = PolicyPublisher(self._config, self._folder, self._fleet, self._learners, self._ladder, probe)
        evaluator = Evaluator(self._config, self._fleet, self._folder, self._telemetry, self._rollout)
        self._held_out = EvaluationSchedule(
            self._config, self._heldout, self._embeddings, self._revisions, evaluator, self._telemetry
        )
        behind = staleness_of(point.updates, self._max_staleness)
        if behind:  # what the open iteration is explored with was made from the checkpoint before
            with self._disk.work("reading the checkpoint before the last"):
                before = state_before(self._folder.checkpoints(), point.updates)
            self._learners.start(before)
            self._make(point.updates - behind)
            self._store()
            self._revisions.explore()
            assert point.state is not None
            self._learners.load(point.state)
        else:
            self._learners.start(point.state)
        self._publish(point.updates)
        self._store()
        self._revisions.regenerate()

    def _iterate(self, iteration: int) -> None:
        config = self._config
        self._rollout.drop_before(iteration)
        self._telemetry.begin_iteration(iteration)
        ahead = self._max_staleness and self._rollout.is_open(iteration)
        words = "sampling" if is_one_stage(config) else "regenerating" if ahead else "exploring"
        self._telemetry.state(words, stage="rollout")
        self._begin(iteration)
        # Who takes turns on a GPU does not begin while others have theirs.
        offer = None if takes_turns(config.fleet) else partial(self._learners.offer, iteration)
        rolled = self._rollout.run(iteration, explored=lambda: self._explored(iteration), offer=offer)
        self._telemetry.state("learning", stage="learn")
        learning = time.monotonic()
        if takes_turns(config.fleet):
            self._rollout.take(self._fleet.release_gpu_cache())  # who rests has no unit, but others may be at work
        learned, closed = self._both(
            lambda: self._learners.learn(iteration, rolled.groups, rolled.embeddings),
            lambda: self._beside_learning(iteration),
            patience=self._held_out.seconds,
        )
        self._rollout.learned(iteration)
        self._commit(iteration, rolled, closed, learned, learning)

    def _beside_learning(self, iteration: int) -> IterationSummary:
        """What is left of an iteration that is learned from, what can be done ahead, and an evaluation that is due."""
        closed = self._rollout.close(iteration)
        unexplored = iteration + 1 + self._max_staleness
        if unexplored < self._config.run.iterations:
            self._embeddings.ask_ahead(self._prompts(unexplored))
        self._held_out.run_prepared()
        return closed

    def _begin(self, iteration: int) -> None:
        """Let the fleet work on an iteration; nothing to do if it does so already."""
        if not self._rollout.is_open(iteration):
            self._explore(iteration)
            self._rollout.fill_workers()  # explorers are needed first: who is ready need not wait
        self._revisions.regenerate()
        self._rollout.regenerate(iteration, self._revisions.newest.digest)

    def _explore(self, iteration: int) -> None:
        """Open an iteration: from now on the explorers, who were sent the revision for it, are given its units."""
        config = self._config
        prompts = self._prompts(iteration)
        fallback_level = self._fallback_level(iteration)
        if news := self._ladder.news(iteration, self._telemetry.iterations):
            self._telemetry.message(news)
        plan = IterationPlan(
            iteration=iteration,
            revision=iteration,
            staleness=staleness_of(iteration, self._max_staleness),
            prompt_ids=tuple(prompt.id for prompt in prompts),
            pool=config.rollout.pool,
            keep=config.rollout.keep,
            micro_batch=pool_sampling(config).micro_batch,
            one_stage=is_one_stage(config),
            policy_digest=self._revisions.explored.digest,
            kinds=kinds_of_prompts(config),
            score_class=self._score_class(),
            audit=audit_plan(config),
            fallback_level=fallback_level,
            steps=self._ladder.steps(fallback_level),
        )
        self._rollout.open(plan, prompts, self._embeddings.of(prompts))

    def _explored(self, iteration: int) -> None:
        """All candidates of `iteration` are in: let the explorers go on with the next one, if they may."""
        following, iterations = iteration + 1, self._config.run.iterations
        if may_explore(
            following, present=iteration, explored=True, max_staleness=self._max_staleness, iterations=iterations
        ):
            if self._revisions.explored is not self._revisions.newest:
                self._revisions.explore()
            self._explore(following)

    def _commit(
        self, iteration: int, rolled: RolloutResult, closed: IterationSummary, learned: UpdateResult, learning: float
    ) -> None:
        """The next revision, and metrics meanwhile; then the checkpoint, which makes the iteration count.

        While it is written, the fleet begins with the next iteration, which does not count before this one does.
        An iteration's record begins where the one before ended, with the publication of its revision.
        """
        seconds = {"learn": learned.ended - learning, "checkpoint": self._checkpoint_seconds}
        first = rolled.clocks["regenerate" if rolled.staleness else "explore"].first
        if first is not None:  # None if a resumed run had everything already
            seconds["publish"] = first - max(self._published, self._began)
        seconds["total"] = time.monotonic() - self._began
        metrics = iteration_metrics(
            self._config,
            iteration=iteration,
            closed=closed,
            rewards=rolled.rewards,
            update=learned.update,
            seconds=seconds | rolled.walls,
            busy_seconds={name: clock.busy for name, clock in rolled.clocks.items()}
            | {"learn": learned.update.seconds},
            factors=learned.state.default,
            publication=rolled.publication,
            fallback_level=self._fallback_level(iteration),
            weights_wait=self._fleet.waited_for_weights(self._began),
        )
        self._telemetry.iteration(metrics)
        self._began = time.monotonic()
        following = iteration + 1
        self._publish(following, also=lambda: self._telemetry.write(metrics))
        self._telemetry.state("writing the checkpoint", stage="checkpoint")
        try:
            if following < self._config.run.iterations and not self._held_out.comes_before(following):
                self._begin(following)
        finally:
            self._checkpoint_seconds = self._meanwhile(
                lambda: self._save(learned.state, following),
                deadline=self._config.fleet.deadlines.checkpoint,
                what=f"the checkpoint after {following} updates in {self._folder.path} (fleet.deadlines.checkpoint)",
            )
        self._meanwhile(lambda: self._learners.leave(capacity.draining()))

    def _save(self, state: LearnerState, updates: int) -> float:
        """Write what a resumed run begins with; returns the seconds that it took."""
        saving = time.monotonic()
        state.save(self._folder.checkpoint(updates))
        self._learners.saved()
        self._revisions.store()
        # With staleness a checkpoint needs the one before, so one more is kept for when the newest is damaged.
        checkpoints = self._config.checkpoints
        self._folder.prune(checkpoints.model_copy(update={"keep": checkpoints.keep + self._max_staleness}))
        if self._uploader is not None:
            self._uploader.submit(self._folder.checkpoint(updates))
        return time.monotonic() - saving

    def _last_state(self) -> LearnerState | None:
        with self._disk.work("reading the last checkpoint"):
            return newest_state(self._folder.checkpoints(), self._folder.path)[1]

    def _store(self) -> None:
        with self._disk.work("writing a revision"):
            self._revisions.store()

    def _publish(self, updates: int, also: Callable[[], None] = lambda: None) -> None:
        """Make revision `updates` of the sampling policy, and do something else meanwhile. Explorers are sent it as
        soon as they may have it, which without staleness is at once; regenerators when their iteration begins."""
        self._telemetry.state(f"publishing revision {updates}", stage="publish")
        self._published = time.monotonic()
        self._make(updates, also)
        if (
            staleness_of(updates, self._max_staleness) == 0 and updates < self._config.run.iterations
        ):  # after that nobody explores
            self._revisions.explore()

    def _make(self, updates: int, also: Callable[[], None] = lambda: None) -> None:
        fallback_level = self._fallback_level(updates + self._max_staleness)
        self._both(lambda: self._revisions.make(updates, fallback_level), also)

    def _fallback_level(self, iteration: int) -> int:
        return self._ladder.fallback_level(iteration, self._telemetry.iterations)

    def _score_class(self) -> str:
        """That of both pools; waits until a worker of each has started, each of which has its deadline."""
        while not self._fleet.score_class:
            self._rollout.poll(seconds=1.0)
        return self._fleet.score_class

    # Evaluation

    def _evaluate_on_the_way(self, updates: int) -> None:
        """If an evaluation of so many updates is due: make it, or what it needs to go on beside the next update."""
        if self._held_out.comes_before(updates):
            self._evaluate(updates)
            self._began = time.monotonic()  # evaluation has a record of its own
        elif self._held_out.goes_beside(updates):
            self._meanwhile(lambda: self._held_out.prepare(updates))

    def _evaluate(self, updates: int) -> None:
        """Evaluate the EMA of so many updates and wait for it, unless that was done."""
        if self._held_out.wants(updates):
            self._held_out.run(updates, self._meanwhile(lambda: self._revisions.policy("ema")))

    # The end, and what is shared

    def _finish(self, seconds: float) -> None:
        self._telemetry.state("writing the report", stage="report")
        model = self._config.model
        convolutions = models.CONVOLUTIONS.get(model.family, ())
        factors = self._learners.factors("ema")
        summary = summarize(self._config, self._telemetry.iterations, self._telemetry.evaluations, seconds=seconds)
        with self._disk.work("writing LoRA file and summary"):
            save_lora(self._folder.lora, factors, model.lora, convolutions)
            write_summary(self._folder.path, summary)
        with self._disk.work("writing the report"):
            build(self._folder.path)
        if self._uploader is not None:
            self._telemetry.state("copying the last checkpoints and the report")
            self._uploader.close(seconds=self._config.fleet.deadlines.upload)
        self._telemetry.state("done")
        self._telemetry.close()

    def _meanwhile(self, work: Callable[[], T], **named: Any) -> T:
        """Have `work` done aside and look after the fleet until it is; an error on either side ends the run at once.

        Args:
            named: deadline and name, as `Background` has them.
        """
        return self._both(work, lambda: None, **named)[0]

    def _both(
        self, work: Callable[[], T], also: Callable[[], U], *, patience: float = 0.0, **named: Any
    ) -> tuple[T, U]:
        """As `_meanwhile`, with something that this thread does first; returns what came of both.

        If that fails, `work` is brought to its end nevertheless.

        Args:
            patience: the longest that `also` may take, seconds; for so long `work` waits for this thread's help.
        """
        self._aside = aside = Background(work, seconds=self._config.fleet.deadlines.update + patience, **named)
        try:
            done = also()
        finally:
            aside.await_end(lambda seconds: self._rollout.poll(seconds=seconds))
        self._aside = None
        return aside.result(), done

    def _supply(self) -> list[Any]:
        """The groups that are learned from once more, for a learner group that is aside."""
        assert self._aside is not None
        groups: list[Any] = self._aside.ask(self._supply_again, what="bringing stored groups once more")
        return groups

    def _supply_again(self) -> list[Any]:
        self._revisions.regenerate()  # if an evaluation came between: damaged groups are made again
        return self._rollout.supply()
