"""The components of a run, created in the order in which they need resources of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.dispatch.rollouts import Rollouts
from actors.evaluation.evaluator import Evaluator
from actors.evaluation.schedule import EvaluationSchedule
from actors.fleet.fleet import Fleet
from actors.monitoring.telemetry import Telemetry
from actors.training.checkpoints import CheckpointWriter
from actors.training.learner_group import LearnerGroup
from actors.training.policy_publisher import PolicyPublisher
from actors.world import OnDisk, Tasks, World, on_disk
from solrl_ray.config.pools import encoders, encodes_on_cards, is_colocated
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import warnings
from solrl_ray.errors import WorkerGone
from solrl_ray.learning.state import LearnerState
from solrl_ray.prompts.schedule import PromptSchedule
from solrl_ray.records import Prompt
from solrl_ray.scheduling import placement
from solrl_ray.scheduling.iteration_state import plan_iteration, staleness_of
from solrl_ray.scheduling.worker_state import replacement_name
from solrl_ray.storage.checkpoints import newest_state, state_before
from solrl_ray.storage.resume import ResumePoint, check_prompts, resume_point
from solrl_ray.storage.run_folder import RunFolder

LOCK_SECONDS = 30.0
"""Seconds that a controller waits for the lock of the run folder, which an earlier controller may still hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    config: Config
    folder: RunFolder
    on_disk: OnDisk
    telemetry: Telemetry
    point: ResumePoint
    """Where the run continues."""
    prompts: PromptSchedule
    embeddings: PromptEmbeddings
    fleet: Fleet
    rollouts: Rollouts
    learners: LearnerGroup
    publisher: PolicyPublisher
    evaluations: EvaluationSchedule
    checkpoints: CheckpointWriter

    async def explore(self, iteration: int) -> None:
        """Open an iteration: explorers get its units as soon as they have loaded its revision."""
        prompts = self.prompts.of(iteration)
        embeddings = await self.embeddings.of(prompts)
        plan = plan_iteration(
            self.config,
            iteration,
            [prompt.id for prompt in prompts],
            score_class=await self.fleet.score_class(),
            policy_digest=await self.publisher.sent_to_explorers.digest,
        )
        await self.rollouts.open(plan, prompts, embeddings)

    async def begin(self, iteration: int) -> None:
        """Start regenerating an iteration, and exploring it unless that has begun ahead. Idempotent."""
        if not self.rollouts.is_open(iteration):
            await self.explore(iteration)
        await self.rollouts.revise(iteration, await self.publisher.newest.digest)
        await self.publisher.to_regenerators()


async def open_run(config: Config, path: Path, telemetry: Telemetry, world: World, tasks: Tasks) -> RunComponents:
    """Create all actors at once, then wait until those that the first step needs are ready."""
    folder, disk = RunFolder(path), partial(on_disk, world, config, path)
    tasks.start(telemetry.keep_writing(), "writing metrics")
    telemetry.state("reading the run folder")
    content = await disk(lambda: read_folder(folder, config), "reading the run folder")
    point, prompts = content.point, PromptSchedule(config, content.train)
    await telemetry.resume(point.iterations, point.evaluations)
    tasks.start(telemetry.tracking.keep(), "bringing metrics to trackers")
    for note in (*point.notes, *(f"warning: {w}" for w in warnings(config))):
        telemetry.message(note)

    telemetry.state("starting workers", stage="start")
    fleet = Fleet(config, world, tasks, telemetry)
    learners = LearnerGroup(
        config,
        world,
        last_state=lambda: disk(lambda: newest_state(folder.checkpoints(), path)[1], "reading the last checkpoint"),
        replacements=fleet.replacements,
        tell=telemetry.message,
        supply=lambda iteration: rollouts[iteration].stored(publisher.regenerating),
    )
    telemetry.waits_for("resources of the learners")
    ranks_first = placement.ranks_first(config)
    if ranks_first:
        await learners.spawn()
    fleet.open()
    await asyncio.sleep(0)  # every worker requests its resources
    if not ranks_first:
        await learners.spawn()
    embeddings = PromptEmbeddings(
        config,
        folder.embeddings,
        world,
        tasks,
        show=partial(telemetry.note, "encoders"),
        lost=lambda name, actor, error: replace_encoder(world, fleet, embeddings, name, actor, error),
    )
    for number in range(encoders(config)):
        embeddings.join(f"encoder-{number}", world.text_encoder(f"encoder-{number}"))
    telemetry.waits_for("the text encoder")
    rollouts = Rollouts(
        config,
        world,
        tasks,
        fleet.router,
        telemetry,
        replacements=fleet.replacements,
        publication=lambda: dict(fleet.publication_counts),
    )
    await embeddings.started.wait()
    if encodes_on_cards(config.fleet):  # all prompts together, so that text encoders are unloaded from the GPUs once
        await embeddings.encode([*content.heldout, *prompts.encoded_with(point.updates)])
    probe = await embeddings.probe(content.heldout[0])
    publisher = PolicyPublisher(config, world, tasks, fleet, learners, probe)
    evaluator = Evaluator(config, world, fleet.router, folder, telemetry)
    run = RunComponents(
        config=config,
        folder=folder,
        on_disk=disk,
        telemetry=telemetry,
        point=point,
        prompts=prompts,
        embeddings=embeddings,
        fleet=fleet,
        rollouts=rollouts,
        learners=learners,
        publisher=publisher,
        evaluations=EvaluationSchedule(config, content.heldout, embeddings, publisher, evaluator, telemetry),
        checkpoints=CheckpointWriter(config, folder, world, telemetry, learners),
    )
    telemetry.waits_for("the learners")
    await _publish_first_revision(run)
    over = point.updates == config.run.iterations
    # Learners that share GPUs with explorers compile just before their first update, so that exploring starts earlier.
    if learners.compiles and not is_colocated(config.fleet) and not over:
        tasks.start(learners.warm_up(probe), "compiling the learners' passes")
    return run


@dataclass(frozen=True, slots=True)
class FolderContent:
    """Contents of a run folder and the prompt files, read before any actor is created."""

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    point: ResumePoint


def read_folder(folder: RunFolder, config: Config) -> FolderContent:
    """Lock a run folder and read where the run continues. Raises as `check_prompts` and `resume_point`."""
    folder.lock.acquire(seconds=LOCK_SECONDS)
    prompts = check_prompts(folder, config)  # again: a file may have changed since the command was entered
    point = resume_point(
        folder, iterations=config.run.iterations, init=config.run.init, staleness=config.rollout.max_staleness
    )
    return FolderContent(prompts["train"], prompts["heldout"], point)


def replace_encoder(
    world: World, fleet: Fleet, embeddings: PromptEmbeddings, name: str, actor: Any, error: WorkerGone
) -> bool:
    """Replace a lost text encoder, unless no encoder has ever started. Returns True if a replacement joins.

    Raises RunError if no replacement is left.
    """
    process = world.process(actor)
    world.kill(actor)
    if not embeddings.started.is_set():
        return False
    counted, process.counted = process.counted, bool(process.name)
    if not counted:
        fleet.replacements.spend(process.name or name, error.reason)
    replacement = replacement_name(name)
    fleet.lost(name, error.reason, replacement, 0, process)
    embeddings.join(replacement, world.text_encoder(replacement))
    return True


async def _publish_first_revision(run: RunComponents) -> None:
    """Load the revision of the first iteration on learners, explorers and regenerators."""
    config, point, publisher = run.config, run.point, run.publisher
    behind = staleness_of(point.updates, config.rollout.max_staleness)
    if behind:  # the open iteration is explored with the revision of the previous checkpoint
        before = await run.on_disk(
            lambda: state_before(run.folder.checkpoints(), point.updates), "reading the second-to-last checkpoint"
        )
        await run.learners.start(before)
        await publisher.make(point.updates - behind)
        await publisher.to_explorers()
        assert point.state is not None
        await run.learners.load(point.state)
    else:
        await run.learners.start(point.state)
    run.telemetry.state(f"publishing revision {point.updates}", stage="publish")
    await publisher.make(point.updates)
    if config.run.on_collapse == "rollback" and point.state is None:  # the base model may turn out to be the best
        first = LearnerState.first(publisher.newest.publication.revision.factors)
        await run.learners.load(first)
        await run.checkpoints.save(first, 0)
    if not behind and point.updates < config.run.iterations:
        await publisher.to_explorers()
    await publisher.to_regenerators()
