"""The parts of a run, opened in the order in which they need places in the cluster; the plan of each iteration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.dispatch.rollouts import Rollouts
from actors.evaluation.evaluator import Evaluator
from actors.evaluation.requests import EvaluationRequests
from actors.evaluation.schedule import EvaluationSchedule
from actors.fleet.fleet import Fleet
from actors.monitoring.telemetry import Telemetry
from actors.training.checkpoints import CheckpointWriter
from actors.training.learner_group import LearnerGroup
from actors.training.policy_publisher import PolicyPublisher
from actors.world import Tasks, World, on_disk
from solrl_ray.config.pools import encoded_ahead, encoders, encodes_on_cards, is_colocated, kinds_of_prompts
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, pool_sampling, reward_weights, unreproducible_rewards, warnings
from solrl_ray.errors import WorkerGone
from solrl_ray.learning.state import LearnerState
from solrl_ray.prompts.prompt_set import choose
from solrl_ray.records import Prompt
from solrl_ray.rollout.selection import SelectionRule
from solrl_ray.scheduling import placement
from solrl_ray.scheduling.iteration_state import IterationPlan, staleness_of
from solrl_ray.scheduling.scaling import forgotten
from solrl_ray.scheduling.worker_state import replacement_name
from solrl_ray.storage.checkpoints import state_before
from solrl_ray.storage.resume import ResumePoint, check_prompts, resume_point
from solrl_ray.storage.run_folder import RunFolder

LOCK_SECONDS = 30.0
"""Seconds that a controller waits for the run folder, which an earlier one may hold."""


class RunComponents:
    """Made by `open`; then every part is ready for the first iteration."""

    fleet: Fleet
    rollouts: Rollouts
    learners: LearnerGroup
    publisher: PolicyPublisher
    evaluations: EvaluationSchedule
    checkpoints: CheckpointWriter
    requests: EvaluationRequests
    embeddings: PromptEmbeddings
    point: ResumePoint
    """Where the run continues."""

    def __init__(self, config: Config, folder: Path, world: World) -> None:
        self.config, self.world = config, world
        self.folder = RunFolder(folder)
        self.on_disk = partial(on_disk, world, config, folder)
        self.telemetry = Telemetry(config, self.folder, world)
        self.heldout: Sequence[Prompt] = ()
        self._train: Sequence[Prompt] = ()
        self.prompts = lru_cache(maxsize=2 + encoded_ahead(config.fleet))(self._choose)
        """Cached by iteration: choosing thousands takes a while."""

    async def open(self, tasks: Tasks) -> None:
        """Spawn every actor at once, then wait for those that the first step needs."""
        config, world = self.config, self.world
        tasks.start(self.telemetry.keep_writing(), "writing metrics")
        self.telemetry.state("reading the run folder")
        self.point, sizes = await self.on_disk(self._find, "reading the run folder")
        await self.telemetry.resume(self.point.iterations, self.point.evaluations)
        tasks.start(self.telemetry.tracking.keep(), "bringing metrics to trackers")
        for note in (*self.point.notes, *forgotten(config, sizes), *(f"warning: {w}" for w in warnings(config))):
            self.telemetry.message(note)
        self.telemetry.state("starting workers", stage="start")
        show = partial(self.telemetry.note, "encoders")
        self.embeddings = PromptEmbeddings(
            config, self.folder.embeddings, world, tasks, show=show, lost=self._encoder_lost
        )
        self.fleet = Fleet(config, world, tasks, self.telemetry)
        self.learners = LearnerGroup(
            config,
            world,
            last_state=self._last_state,
            replacements=self.fleet.replacements,
            tell=self.telemetry.message,
            supply=self._supply,
        )
        # Ranks or pools first: see `ranks_first`.
        first, second = self.learners.spawn, self._open_fleet
        if not placement.ranks_first(config):
            first, second = second, first
        self.telemetry.waits_for("places of the learners")
        await first()
        await second()
        for number in range(encoders(config)):
            self._encode_with(f"encoder-{number}")
        self.telemetry.waits_for("the text encoder")
        self.rollouts = Rollouts(
            config,
            world,
            tasks,
            self.fleet.router,
            self.telemetry,
            replacements=self.fleet.replacements,
            publication=lambda: dict(self.fleet.publication_counts),
        )
        await self.embeddings.started.wait()
        if encodes_on_cards(config.fleet):  # at once, so that text encoders leave the cards once
            await self.embeddings.encode([*self.heldout, *self.prompts_from(self.point.updates)])
        probe = await self.embeddings.probe(self.heldout[0])
        self.publisher = PolicyPublisher(config, world, tasks, self.fleet, self.learners, probe)
        evaluator = Evaluator(config, world, self.fleet.router, self.folder, self.telemetry)
        self.evaluations = EvaluationSchedule(
            config, self.heldout, self.embeddings, self.publisher, evaluator, self.telemetry
        )
        self.requests = EvaluationRequests(
            config, world, self.fleet.router, self.publisher, self.embeddings, self.telemetry.message
        )
        self.checkpoints = CheckpointWriter(config, self.folder, world, self.telemetry, self.learners)
        self.telemetry.waits_for("the learners")
        await self._first_revision()
        over = self.point.updates == config.run.iterations
        # Learners on cards compile before their first update: explorers begin sooner.
        if self.learners.compiles and not is_colocated(config.fleet) and not over:
            tasks.start(self.learners.warm_up(probe), "compiling the learners' passes")

    async def open_iteration(self, iteration: int) -> None:
        """Open an iteration: its units go to explorers that hold its revision."""
        prompts = self.prompts(iteration)
        embeddings = await self.embeddings.of(prompts)
        score_class, digest = await self.fleet.score_class(), await self.publisher.sent_to_explorers.digest
        plan = replace(self._plan(iteration, prompts), score_class=score_class, policy_digest=digest)
        await self.rollouts.open(plan, prompts, embeddings)

    def _plan(self, iteration: int, prompts: Sequence[Prompt]) -> IterationPlan:
        config, sampling = self.config, pool_sampling(self.config)
        return IterationPlan(
            iteration=iteration,
            revision=iteration,
            staleness=staleness_of(iteration, config.rollout.max_staleness),
            prompt_ids=tuple(prompt.id for prompt in prompts),
            pool=config.rollout.pool,
            keep=config.rollout.keep,
            unit=sampling.unit,
            selection=SelectionRule(
                kind=config.rollout.selection, run_seed=config.run.seed, weights=reward_weights(config)
            ),
            one_stage=is_one_stage(config),
            kinds=kinds_of_prompts(config),
            prune=sampling.pruning,
            reproducible=not unreproducible_rewards(config),
        )

    def _find(self) -> tuple[ResumePoint, Mapping[str, int]]:
        config = self.config
        self.folder.lock.acquire(seconds=LOCK_SECONDS)
        prompts = check_prompts(self.folder, config)  # again: a file may have changed since the command
        self._train, self.heldout = prompts["train"], prompts["heldout"]
        point = resume_point(
            self.folder, iterations=config.run.iterations, init=config.run.init, staleness=config.rollout.max_staleness
        )
        return point, self.folder.take_sizes()

    def prompts_from(self, iteration: int) -> list[Prompt]:
        """Of the iterations that are encoded together with this one."""
        last = min(iteration + encoded_ahead(self.config.fleet), self.config.run.iterations)
        return [prompt for each in range(iteration, last) for prompt in self.prompts(each)]

    def _choose(self, iteration: int) -> Sequence[Prompt]:
        return choose(self._train, self.config.run.seed, iteration, count=self.config.rollout.prompts)

    def _encode_with(self, encoder: str) -> None:
        self.embeddings.join(encoder, self.world.text_encoder(encoder))

    def _encoder_lost(self, name: str, actor: Any, error: WorkerGone) -> bool:
        """Replace an encoder, unless none has ever worked. Raises RunError if no replacement is left."""
        process = self.world.process(actor)
        self.world.kill(actor)
        if not self.embeddings.started.is_set():
            return False
        counted, process.counted = process.counted, bool(process.name)
        if not counted:
            self.fleet.replacements.spend(process.name or name, error.reason)
        replacement = replacement_name(name)
        self.fleet.lost(name, error.reason, replacement, 0, process)
        self._encode_with(replacement)
        return True

    async def _open_fleet(self) -> None:
        self.fleet.open()
        await asyncio.sleep(0)  # every worker asks for its place

    async def _first_revision(self) -> None:
        """Give learners, explorers and regenerators the revision that the first iteration begins with."""
        point, publisher = self.point, self.publisher
        behind = staleness_of(point.updates, self.config.rollout.max_staleness)
        if behind:  # the open iteration is explored with a revision from the checkpoint before
            before = await self.on_disk(
                lambda: state_before(self.folder.checkpoints(), point.updates), "reading the checkpoint before the last"
            )
            await self.learners.start(before)
            await publisher.make(point.updates - behind)
            await publisher.to_explorers()
            assert point.state is not None
            await self.learners.load(point.state)
        else:
            await self.learners.start(point.state)
        self.telemetry.state(f"publishing revision {point.updates}", stage="publish")
        await publisher.make(point.updates)
        if self.config.run.on_collapse == "rollback" and point.state is None:  # the base may be the best
            first = LearnerState.first(publisher.newest.publication.revision.factors)
            await self.learners.load(first)
            await self.checkpoints.save(first, 0)
        if not behind and point.updates < self.config.run.iterations:
            await publisher.to_explorers()
        await publisher.to_regenerators()

    async def _last_state(self) -> LearnerState | None:
        state: LearnerState | None = await self.on_disk(self.checkpoints.newest, "reading the last checkpoint")
        return state

    async def _supply(self, iteration: int) -> list[Any]:
        """An iteration's groups, once more."""
        return await self.rollouts[iteration].stored(self.publisher.regenerating)
