"""Runs an evaluation on the regenerators: hands out its units, collects the answers and writes the results.

Prompts and noise addresses are fixed; the policy is the one that the regenerators hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from actors.dispatch.unit_router import Call, UnitRouter
from actors.monitoring.telemetry import Telemetry
from actors.workers.regenerator import Evaluated
from actors.world import World, on_disk
from solrl_ray.common.files import make_folder
from solrl_ray.config.pools import REGENERATORS
from solrl_ray.config.schema import Config
from solrl_ray.evaluation.held_out import UNIT_POLICY, evaluation_metrics, evaluation_units
from solrl_ray.metrics.records import EvaluationMetrics, added
from solrl_ray.records import Prompt, WorkUnit
from solrl_ray.report.grids import save_pictures, save_references
from solrl_ray.scheduling.dispatcher import Held
from solrl_ray.storage.run_folder import RunFolder


async def score_policy(
    config: Config,
    prompts: Sequence[Prompt],
    embeddings: Mapping[str, Any],
    router: UnitRouter,
    *,
    updates: int,
    policy: str,
    method: str = "evaluate",
    holds: Held | None = None,
    changed: Callable[[int, int], object],
) -> dict[str, Evaluated]:
    """Score the policy that the regenerators hold; returns prompt id → scores.

    Args:
        embeddings: prompt id → reference to its embedding; for ``score_reference``, only prompts with reference images
            need one.
        updates, policy: as for `evaluation_units`.
        method: method of the regenerator to call.
        holds: policy and revision that regenerators must hold, if not those of the units.
        changed: called after each answer, with the number of answered prompts and the number of all prompts.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    shown = {prompt.id for prompt in prompts[: config.evaluation.pictures]}
    answers: dict[str, Evaluated] = {}

    async def answer(position: int, unit: WorkUnit) -> None:
        ids = (unit.prompt_id, *unit.beside)
        images = sum(prompt_id in shown for prompt_id in ids)
        # Separate arguments, because Ray does not resolve references inside a list.
        needed = [embeddings[one] for one in ids if method != "score_reference" or one in embeddings]
        call = Call(method, (unit, [by_id[one] for one in ids], images, *needed))
        reply = await router.request(unit, call, pool=REGENERATORS, order=(position,), holds=holds)
        router.accepted(unit)
        answers.update({one.unit.prompt_id: one for one in (replace(reply.value, beside=()), *reply.value.beside)})
        changed(len(answers), len(prompts))

    async with asyncio.TaskGroup() as group:
        for position, unit in enumerate(evaluation_units(config, prompts, updates=updates, policy=policy)):
            group.create_task(answer(position, unit), name=unit.id)
    return answers


class Evaluator:
    """Evaluates the policy that the regenerators hold, and writes the results to the run folder."""

    def __init__(
        self, config: Config, world: World, router: UnitRouter, folder: RunFolder, telemetry: Telemetry
    ) -> None:
        self._config, self._world, self._router = config, world, router
        self._folder, self._telemetry = folder, telemetry

    async def run(
        self,
        policy: str,
        updates: int,
        prompts: Sequence[Prompt],
        embeddings: Mapping[str, Any],
        *,
        holder: str = "",
        overlaps: bool = False,
    ) -> None:
        """Evaluate the policy that the regenerators hold, or real images, and save the results.

        Args:
            policy: name in the results: ``base`` or ``ema`` for a policy, ``real`` for real images.
            updates: number of updates so far; also the revision that the regenerators hold.
            embeddings: prompt id → reference to its embedding.
            holder: name of the policy that the regenerators hold, if not that of `UNIT_POLICY`.
            overlaps: True if an update runs meanwhile; the displayed stage stays that of the update.
        """
        started = self._world.now()
        if not overlaps:
            self._telemetry.state(f"evaluating {policy}", stage="evaluate")
        shown = prompts[: self._config.evaluation.pictures]
        scored = await score_policy(
            self._config,
            prompts,
            embeddings,
            self._router,
            updates=updates,
            policy=holder or UNIT_POLICY[policy],
            method="score_reference" if policy == "real" else "evaluate",
            holds=("old", updates) if policy == "real" else None,
            changed=partial(self._telemetry.stage, "evaluate"),
        )
        images = {key: evaluated.images for key, evaluated in scored.items() if evaluated.images is not None}
        metrics = evaluation_metrics(
            {prompt.id: scored[prompt.id].rewards for prompt in prompts},
            updates=updates,
            policy=policy,
            seconds=self._world.now() - started,
            captions={p.id: p.text for p in shown},
            overlapped=overlaps,
            reward_costs=added([evaluated.reward_costs for evaluated in scored.values()]),
        )
        await self._save(metrics, images, shown)

    async def _save(
        self, metrics: EvaluationMetrics, images: Mapping[str, torch.Tensor], shown: Sequence[Prompt]
    ) -> None:
        """Write images first, then metrics, so that the images of all metrics on disk exist."""
        folder = self._folder.evaluations / f"updates-{metrics.iteration:06d}-{metrics.policy}"
        by_sample = {(p.id, sample): image for p in shown for sample, image in enumerate(images[p.id])}

        def write() -> None:
            make_folder(folder)  # also syncs the folder's name to disk
            save_pictures(folder, by_sample, self._config.model.fps)
            save_references(self._folder.references, shown, self._config.model.shapes[0])

        await on_disk(self._world, self._config, self._folder.path, write, "writing an evaluation")
        self._telemetry.evaluation(metrics, [list(images[p.id]) for p in shown])
