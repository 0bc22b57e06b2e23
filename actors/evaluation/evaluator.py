"""An evaluation on the regenerators: its units handed out, answers collected, results written; fixed prompts and
addresses, any policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from actors.dispatch.unit_router import Answer, Owner, UnitRouter
from actors.monitoring.telemetry import Telemetry
from actors.workers.regenerator import Evaluated
from actors.world import World, on_disk
from solrl_ray.common.files import make_folder
from solrl_ray.config.pools import REGENERATORS
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import unreproducible_rewards
from solrl_ray.errors import RunError
from solrl_ray.evaluation.held_out import UNIT_POLICY, evaluation_metrics, evaluation_units
from solrl_ray.metrics.records import EvaluationMetrics, added
from solrl_ray.records import Prompt, WorkUnit
from solrl_ray.report.grids import save_pictures, save_references
from solrl_ray.scheduling.dispatcher import Held
from solrl_ray.scheduling.ledger import Ledger, Outcome
from solrl_ray.storage.run_folder import RunFolder


class Evaluation(Owner):
    """Requests units that regenerators evaluate, and collects the answers."""

    def __init__(
        self,
        batch: str,
        config: Config,
        prompts: Sequence[Prompt],
        embeddings: Mapping[str, Any],
        router: UnitRouter,
        *,
        updates: int,
        policy: str,
        method: str = "evaluate",
        strict: bool,
        tell: Callable[[str], None],
        changed: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        """
        Args:
            embeddings: prompt id → reference of its embedding, of all prompts before it begins.
            updates, policy: as for `evaluation_units`.
            method: the regenerator's; ``score`` takes the configuration, ``score_reference`` embeddings only of prompts
                with reference pictures.
            strict: whether a second answer with other rewards is an error (`fleet.strict`).
            tell: is given a sentence for the user.
            changed: called after each answer, with the numbers of prompts that are answered and of all.
        """
        self.batch = batch
        self.answers: dict[str, Evaluated] = {}
        """By prompt id; the first answer counts."""
        self.units = evaluation_units(config, prompts, updates=updates, policy=policy)
        self.completed = asyncio.Event()
        self.answered = asyncio.Event()
        """Set after each answer; the waiting task clears it."""
        self._config, self._embeddings, self._method, self._router = config, embeddings, method, router
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._pictured = {prompt.id for prompt in prompts[: config.evaluation.pictures]}
        self._strict, self._tell, self._changed = strict, tell, changed
        self._reproducible = not unreproducible_rewards(config)
        self.ledger = Ledger(self.units)

    def begin(self, holds: Held | None = None) -> None:
        """Hand out the remaining units to regenerators that hold the policy (default: the units' own)."""
        self._router.request(self, self.ledger.wanted(), REGENERATORS, holds=holds)

    async def finish(self) -> None:
        """Return once every unit is answered."""
        await self.completed.wait()  # each unit has its deadline
        self._router.drop(self)

    # Owner

    def call(self, unit: WorkUnit) -> tuple[str, tuple[Any, ...], int]:
        prompts = [self._prompts[prompt_id] for prompt_id in (unit.prompt_id, *unit.beside)]
        pictured = sum(prompt.id in self._pictured for prompt in prompts)
        how = (self._config,) if self._method == "score" else ()
        ids = [prompt.id for prompt in prompts]
        if self._method == "score_reference":
            ids = [one for one in ids if one in self._embeddings]
        embeddings = [self._embeddings[one] for one in ids]  # by themselves: references in a list are not resolved
        return self._method, (*how, unit, prompts, pictured, *embeddings), 1

    async def judge(self, answer: Answer) -> Evaluated:
        """Raises RunError if the rewards differ from an earlier answer's and the run is strict."""
        unit, value = answer.unit, answer.value
        found = {one.unit.prompt_id: one for one in (replace(value, beside=()), *value.beside)}
        rewards = tuple(reward for one in found.values() for reward in one.rewards)
        scores = repr(rewards) if self._reproducible else "rewards that may differ"
        outcome = self.ledger.finish(unit.id, scores, answer.worker)
        if outcome is Outcome.ACCEPTED:
            self.answers |= found
        elif outcome is Outcome.VIOLATION:
            said = f"{answer.worker} has other rewards for {unit.describe()} than {self.ledger.finisher(unit.id)}"
            if self._strict:
                raise RunError(f"{said}, and fleet.strict is true")
            self._tell(f"{said}; the first ones count")
        self._changed(len(self.answers), len(self._prompts))
        self.answered.set()
        if self.ledger.complete:
            self.completed.set()
        return self.answers[unit.prompt_id]


class Evaluator:
    """Evaluates what the regenerators hold, and writes the results to the run folder."""

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
        """Evaluate what the regenerators hold as `policy` (``base``, ``ema``), or ``real`` pictures, and save it.

        Args:
            updates: updates done so far; also the revision that the regenerators hold.
            embeddings: prompt id → reference of its embedding.
            holder: the policy that the regenerators were given, if not that of `UNIT_POLICY`.
            overlaps: whether an update runs meanwhile; the shown stage is the update's then.
        """
        started = self._world.now()
        if not overlaps:
            self._telemetry.state(f"evaluating {policy}", stage="evaluate")
        pictured = prompts[: self._config.evaluation.pictures]
        evaluation = Evaluation(
            f"evaluation of {policy} after {updates} updates",
            self._config,
            prompts,
            embeddings,
            self._router,
            updates=updates,
            policy=holder or UNIT_POLICY[policy],
            method="score_reference" if policy == "real" else "evaluate",
            strict=self._config.fleet.strict,
            tell=self._telemetry.message,
            changed=partial(self._telemetry.stage, "evaluate"),
        )
        evaluation.begin(holds=("old", updates) if policy == "real" else None)
        await evaluation.finish()
        found = evaluation.answers
        images = {key: evaluated.images for key, evaluated in found.items() if evaluated.images is not None}
        metrics = evaluation_metrics(
            {prompt.id: found[prompt.id].rewards for prompt in prompts},
            updates=updates,
            policy=policy,
            seconds=self._world.now() - started,
            captions={p.id: p.text for p in pictured},
            overlapped=overlaps,
            duplicates=evaluation.ledger.duplicates,
            differing=evaluation.ledger.violations,
            reward_costs=added([evaluated.reward_costs for evaluated in found.values()]),
        )
        await self._keep(metrics, images, pictured)

    async def _keep(
        self, metrics: EvaluationMetrics, images: Mapping[str, torch.Tensor], pictured: Sequence[Prompt]
    ) -> None:
        """Write the pictures first, so that metrics on the disk always have theirs."""
        folder = self._folder.evaluations / f"updates-{metrics.iteration:06d}-{metrics.policy}"
        pictures = {(p.id, sample): image for p in pictured for sample, image in enumerate(images[p.id])}

        def write() -> None:
            make_folder(folder)  # with its name synced
            save_pictures(folder, pictures, self._config.model.fps)
            save_references(self._folder.references, pictured, self._config.model.shapes[0])

        await on_disk(self._world, self._config, self._folder.path, write, "writing an evaluation")
        self._telemetry.evaluation(metrics, [list(images[p.id]) for p in pictured])
