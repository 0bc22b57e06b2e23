"""``solrl eval``: the policies of a run folder against any rewards, on regenerators of its own.

    checkpoint ─► merger: a revision a policy ─► scorers: base, then LoRA, then EMA at the same addresses ─► table, page

No learner and no explorer is started, and a run that is live elsewhere is only read from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from actors.client import launch
from actors.client.controller_actor import namespace
from actors.cluster import capacity, wait
from actors.evaluation.evaluator import collect
from actors.fleet.actor_factory import ActorClasses, ActorFactory, on_this_node
from actors.fleet.fleet import Fleet
from actors.monitoring.telemetry import Telemetry
from actors.workers.learner_rank import LearnerRank
from actors.workers.regenerator import Evaluated
from actors.workers.scorer import Scorer
from solrl_ray.config.schema import Config, Learners, WorkerPool
from solrl_ray.evaluation.held_out import (
    EVAL_POLICIES,
    evaluation_metrics,
    evaluation_units,
    policy_factors,
    reward_names,
)
from solrl_ray.learning.state import LearnerState
from solrl_ray.metrics.records import Progress
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.records import Prompt
from solrl_ray.report.comparison import PAGE_FILE, Comparison, write_comparison
from solrl_ray.report.grids import save_pictures
from solrl_ray.report.live import LiveView
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publication import REGENERATOR, Publications
from solrl_ray.weight_sync.publish import assemble


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is evaluated. How (prompts, samples, steps, solver, rewards) the configuration says."""

    run: Path
    out: Path
    policies: tuple[str, ...]
    """Keys of `EVAL_POLICIES`."""


class Merger(LearnerRank):
    """Has the base weights, so it can say what a receiver of any policy must end with. It learns nothing."""

    def merge(self, updates: int, factors: dict[str, Any], policy: Policy) -> Revision:
        part = self._publisher.part(updates, factors, policy=policy, rank=0, world_size=1)
        return assemble([part], self._config.model.lora)


ROLES = ActorClasses(regenerator=Scorer, learner=Merger)


def evaluate(config: Config, state: LearnerState, request: Request, *, address: str | None, live: bool) -> Path:
    """Evaluate on a cluster (`address`) or on a local Ray; returns the page. Raises as `launch.train` does."""
    with ExitStack() as stack:
        if launch.connect(address):
            stack.callback(ray.shutdown)
        capacity.await_resources(with_regenerators_alone(config))
        view = stack.enter_context(LiveView(plain=not live))
        request.out.mkdir(parents=True, exist_ok=True)
        name = namespace(request.out)
        actor = on_this_node(Evaluation, "evaluation", name, max_concurrency=4)
        evaluation = actor.remote(launch.located(config), state, request)
        stack.callback(ray.kill, evaluation)
        launch.follow(evaluation, view, config)
    return request.out / PAGE_FILE


def with_regenerators_alone(config: Config) -> Config:
    """The configuration of a run whose other actors ask for nothing."""
    fleet = config.fleet.model_copy(update={"explorers": WorkerPool(), "learners": Learners()})
    return config.model_copy(update={"fleet": fleet})


def _images(evaluated: Evaluated) -> torch.Tensor:
    """The pictures of a unit that was asked for them, float32 [n, 3, H, W]."""
    assert evaluated.images is not None
    return evaluated.images


class Evaluation:
    """The controller of one evaluation."""

    def __init__(self, config: Config, state: LearnerState, request: Request) -> None:
        self._config, self._state, self._request = config, state, request
        self._telemetry = Telemetry(config, RunFolder(request.out))
        self._cast = ActorFactory(config, request.run, ROLES, scope=namespace(request.out))
        self._prompts = read_prompts(config.prompts.heldout)[: config.evaluation.prompts]

    def progress(self) -> Progress:
        """A snapshot; answers from another thread while `run` is at work."""
        return self._telemetry.progress()

    def run(self) -> None:
        self._telemetry.state("merging policies")
        merger = self._cast.learner(0)
        seconds = self._config.fleet.deadlines.publish
        revisions = merged(merger, self._config, self._state, self._request.policies, seconds=seconds)
        ray.kill(merger)  # the scorers take its place
        self._telemetry.state("starting workers")
        fleet = Fleet(self._config, self._cast, self._telemetry, explores=False)
        fleet.open()
        embeddings = self._embedded()
        found: dict[str, dict[str, Evaluated]] = {}
        for policy, revision in revisions.items():
            self._telemetry.state(f"evaluating {policy}")
            publication = Publications(self._config.publish).publish(revision)
            fleet.publish(REGENERATOR, publication, embeddings[self._prompts[0].id])
            found[policy] = self._evaluate(fleet, policy, embeddings)
        with self._telemetry.disk.work("writing what was found"):
            write(self._config, self._request, self._state, found)
        self._telemetry.state("done")

    def _embedded(self) -> dict[str, Any]:
        deadlines = self._config.fleet.deadlines
        encoder = self._cast.encoder()
        wait.get(encoder.start.remote(), what="the start of the encoder", seconds=deadlines.start)
        refs = {prompt.id: encoder.embed.remote(prompt) for prompt in self._prompts}
        seconds = deadlines.encode * len(refs)
        wait.get(list(refs.values()), what=f"encoding {len(refs)} prompts", seconds=seconds)
        self._encoder = encoder  # what it made lives as long as it does
        return refs

    def _evaluate(self, fleet: Fleet, policy: str, embeddings: dict[str, Any]) -> dict[str, Evaluated]:
        shown = {prompt.id for prompt in self._prompts[: self._config.evaluation.pictures]}
        units = evaluation_units(self._config, self._prompts, updates=self._state.updates, policy=EVAL_POLICIES[policy])
        by_id = {prompt.id: prompt for prompt in self._prompts}

        def arguments(prompt: Prompt) -> tuple[Any, ...]:
            return prompt, embeddings[prompt.id], prompt.id in shown

        strict = self._config.fleet.strict
        return collect(
            fleet, self._telemetry, units, "evaluate", lambda unit: arguments(by_id[unit.prompt_id]), strict=strict
        ).answers


def merged(
    merger: Any, config: Config, state: LearnerState, policies: Sequence[str], *, seconds: float
) -> dict[str, Revision]:
    """Every policy as a revision, made by the actor `merger`; `seconds` is the deadline of each."""
    deadlines = config.fleet.deadlines
    wait.get(merger.start.remote(), what="the start of the merger", seconds=deadlines.start)
    revisions = {}
    for policy in policies:
        ref = merger.merge.remote(state.updates, policy_factors(state, policy), EVAL_POLICIES[policy])
        revisions[policy] = wait.get(ref, what=f"merging {policy}", seconds=seconds)
    return revisions


def write(config: Config, request: Request, state: LearnerState, found: Mapping[str, Mapping[str, Evaluated]]) -> Path:
    """Write pictures, numbers and the page of what was found (policy → prompt id → scores); returns the page."""
    request.out.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(config.prompts.heldout)[: config.evaluation.prompts]
    shown = [prompt.id for prompt in prompts[: config.evaluation.pictures]]
    names = reward_names(config.rewards)
    results = {}
    for policy, scored in found.items():
        pictures = {(key, n): image for key in shown for n, image in enumerate(_images(scored[key]))}
        save_pictures(request.out / policy, pictures)
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
