"""``solrl eval`` of a run that is not live: merges its policies and scores them on regenerators that it starts.

    checkpoint ─► merger: one revision per policy
               ─► regenerators: base, then LoRA, then EMA, at the same noise addresses ─► table, page

It starts no learner and no explorer, and only reads the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors.client import launch
from actors.client.connect import joined
from actors.cluster import capacity
from actors.cluster.names import EVALUATION, namespace
from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.evaluation.evaluator import score_policy
from actors.fleet.actor_factory import ActorClasses, ActorFactory, on_this_node
from actors.fleet.fleet import Fleet
from actors.monitoring.telemetry import Telemetry
from actors.ray_world import RayWorld
from actors.workers.learner_rank import LearnerRank
from actors.workers.regenerator import Evaluated
from actors.world import Tasks, World, on_disk
from solrl_ray.config.fleet import Learners, WorkerPool
from solrl_ray.config.pools import encoders
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import full_tier
from solrl_ray.evaluation.held_out import evaluation_metrics, policy_factors, reward_names
from solrl_ray.learning.state import LearnerState
from solrl_ray.metrics.records import Progress
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.report.comparison import PAGE_FILE, Comparison, write_comparison
from solrl_ray.report.grids import REFERENCE, save_pictures, save_references
from solrl_ray.report.live import LiveView
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publication import REGENERATOR, Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """The run and the policies to evaluate. Prompts, samples, steps, solver and rewards are in the configuration."""

    run: Path
    out: Path
    policies: tuple[str, ...]
    """Names from `EVAL_POLICIES`."""


class Merger(LearnerRank):
    """Holds the base weights, to merge policies and compute the checksums that their receivers must reach. Does not
    train.
    """

    def merge(self, updates: int, factors: dict[str, Any], policy: Policy) -> Revision:
        return self._publisher.build(updates, factors, policy=policy)

    def _tier_of_explorers(self) -> str:
        return full_tier(self._config.model)  # there are no explorers, and the run's configuration may say `auto`


CLASSES = ActorClasses(learner=Merger)


def evaluate(config: Config, state: LearnerState, request: EvalRequest, *, address: str | None, live: bool) -> Path:
    """Evaluate on a cluster (`address`) or on a local Ray; returns the path of the page. Raises as `launch.train`."""
    with ExitStack() as stack:
        stack.enter_context(joined(address, job=f"evaluation of {config.run.name}", tell=True))
        capacity.await_resources(with_regenerators_alone(config))
        view = stack.enter_context(LiveView(plain=not live))
        request.out.mkdir(parents=True, exist_ok=True)
        name = namespace(request.out)
        actor = on_this_node(FinishedRunEvaluation, EVALUATION, name)
        evaluation = actor.remote(launch.located(config), state, request)
        stack.callback(ray.kill, evaluation)
        launch.follow(evaluation, view, config, again="evaluate again")
    return request.out / PAGE_FILE


def with_regenerators_alone(config: Config) -> Config:
    """The configuration in which only regenerators and text encoders request resources."""
    return config.changed({"fleet.explorers": WorkerPool(), "fleet.learners": Learners()})


class FinishedRunEvaluation:
    """The controller of one evaluation, as an actor."""

    def __init__(self, config: Config, state: LearnerState, request: EvalRequest) -> None:
        self._config, self._state, self._request = config, state, request
        factory = ActorFactory(config, request.run, CLASSES, scope=namespace(request.out), controller=EVALUATION)
        self._world = RayWorld(factory)
        self._telemetry = Telemetry(config, RunFolder(request.out), self._world)
        self._prompts = read_prompts(config.prompts.heldout)[: config.evaluation.prompts]

    async def progress(self, since: int = 0) -> Progress:
        return self._telemetry.progress(since)

    async def note(self, worker: str, words: str) -> None:
        """See `ControllerActor.note`."""
        self._telemetry.note(worker, words)

    async def run(self) -> None:
        config, deadlines = self._config, self._config.fleet.deadlines
        async with Tasks() as tasks:
            tasks.start(self._telemetry.keep_writing(), "writing metrics")
            self._telemetry.state("merging policies")
            merger, policies = self._world.learner(0, 0), self._request.policies
            publications = await merged(self._world, merger, config, self._state, policies, seconds=deadlines.publish)
            self._telemetry.state("starting workers")
            fleet = Fleet(config, self._world, tasks, self._telemetry, explores=False)
            fleet.open()
            folder, show = RunFolder(self._request.run).embeddings, partial(self._telemetry.note, "encoders")
            embeddings = PromptEmbeddings(config, folder, self._world, tasks, show=show)
            for number in range(encoders(config)):
                embeddings.join(f"encoder-{number}", self._world.text_encoder(f"encoder-{number}"))
            await embeddings.started.wait()
            references = await embeddings.of(self._prompts, config.evaluated_model)
            probe = await embeddings.probe(self._prompts[0])
            scores: dict[str, dict[str, Evaluated]] = {}
            for policy, publication in publications.items():
                self._telemetry.state(f"evaluating {policy}")
                await fleet.publish(REGENERATOR, publication, probe)
                scores[policy] = await score_policy(
                    config,
                    self._prompts,
                    references,
                    fleet.router,
                    updates=self._state.updates,
                    policy=policy,
                    changed=partial(self._telemetry.stage, "evaluate"),
                )
            write_results = partial(write, config, self._request, self._state, scores)
            await on_disk(self._world, config, self._request.out, write_results, "writing the results")
            self._telemetry.state("done")


async def merged(
    world: World, merger: Any, config: Config, state: LearnerState, policies: Sequence[str], *, seconds: float
) -> dict[str, Publication]:
    """Merge all policies on the actor `merger`, which ends afterwards; returns policy → publication.

    `seconds`: deadline for each policy.
    """
    try:
        starting = world.send(merger, "start")
        await world.answer(starting, what="the start of the merger", seconds=config.fleet.deadlines.start)
        publications = {}
        for policy in policies:
            factors = policy_factors(state, policy)
            sent = world.send(merger, "merge", state.updates, factors, policy)
            revision: Revision = await world.answer(sent, what=f"merging {policy}", seconds=seconds)
            publications[policy] = Publication(revision=revision, mode=config.publish.mode)
        return publications
    finally:
        world.kill(merger)  # frees its resources for regenerators


def write(
    config: Config, request: EvalRequest, state: LearnerState, found: Mapping[str, Mapping[str, Evaluated]]
) -> Path:
    """Write images, numbers and page of `found` (policy → prompt id → scores); returns the path of the page."""
    request.out.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(config.prompts.heldout)[: config.evaluation.prompts]
    shown = [prompt.id for prompt in prompts[: config.evaluation.pictures]]
    save_references(request.out / REFERENCE, prompts[: config.evaluation.pictures], config.model.shapes[0])
    names = reward_names(config.rewards)
    results = {}
    for policy, scored in found.items():
        of_prompt = ((key, scored[key].images) for key in shown)
        by_sample = {(key, n): image for key, batch in of_prompt if batch is not None for n, image in enumerate(batch)}
        save_pictures(request.out / policy, by_sample, config.model.fps)
        results[policy] = {
            name: evaluation_metrics(
                {prompt.id: scored[prompt.id].columns[position] for prompt in prompts},
                updates=state.updates,
                policy=policy,
                seconds=0.0,
                captions={},
            )
            for position, name in enumerate(names)
        }
    write_comparison(request.out, Comparison.of(config, results, prompts, updates=state.updates))
    return request.out / PAGE_FILE
