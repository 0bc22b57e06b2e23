"""Held-out evaluation on the regenerators: fixed prompts, fixed addresses, whatever policy they hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.dispatch.rollout import Rollout
from actors.fleet.events import Lost, Nonsense, Work
from actors.fleet.fleet import Fleet
from actors.monitoring.telemetry import Telemetry
from actors.workers.regenerator import Evaluated
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.evaluation.held_out import UNIT_POLICY, evaluation_metrics, evaluation_units
from solrl_ray.metrics.records import EvaluationMetrics
from solrl_ray.records import Prompt, WorkUnit
from solrl_ray.report.grids import save_pictures
from solrl_ray.scheduling.ledger import Ledger, Outcome
from solrl_ray.storage.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Collected:
    answers: dict[str, Evaluated]
    """By prompt id; of several to a unit the first one."""
    duplicates: int
    """Answers to units that were answered before, and those of them with other rewards."""
    differing: int


def collect(
    fleet: Fleet,
    telemetry: Telemetry,
    units: Sequence[WorkUnit],
    method: str,
    arguments: Callable[[WorkUnit], tuple[Any, ...]],
    rollout: Rollout | None = None,
    *,
    strict: bool,
) -> Collected:
    """Have the regenerators do every unit, whoever is lost on the way.

    Args:
        method: the regenerator's; it is called with the unit and its `arguments`.
        rollout: what explorers go on with meanwhile.
        strict: `fleet.strict`.

    Raises:
        RunError: as `Fleet.events`; or a unit was answered twice with different rewards, and `strict`.
    """
    ledger, pool = Ledger(units), fleet.regenerators
    found: dict[str, Evaluated] = {}
    while not ledger.complete:
        leases = [(worker, unit) for worker in pool.slots() if (unit := ledger.lease(worker)) is not None]
        if ledger.all_out:
            leases += [(worker, unit) for worker, unit in fleet.hedges(pool) if ledger.hedge(worker, unit.id)]
        for worker, unit in leases:
            pool.give(worker, unit, method, unit, *arguments(unit))
        if rollout is not None:
            rollout.hand_out()
        events = fleet.events(seconds=1.0)
        for event in events:
            if said := _take(event, fleet, ledger, found):
                if strict:
                    raise RunError(f"{said}, and fleet.strict is true")
                telemetry.message(f"{said}; the first ones count")
        if rollout is not None:
            rollout.take(events)
        telemetry.stage("evaluate", ledger.done, len(ledger))
    return Collected(found, ledger.duplicates, ledger.violations)


def _take(event: Work, fleet: Fleet, ledger: Ledger, found: dict[str, Evaluated]) -> str:
    """Returns a sentence on an answer with other rewards than the first one to its unit."""
    if isinstance(event, Lost):
        ledger.release(event.worker)
    elif event.unit not in ledger:
        pass  # the rollout's
    elif isinstance(event, Nonsense):
        ledger.requeue(event.unit.id, event.worker)
        if fleet.refuse(event.worker, event.unit, event.reason) is not None:
            ledger.release(event.worker)
    else:
        outcome = ledger.finish(event.unit.id, repr(event.value.rewards), event.worker)
        if outcome is Outcome.ACCEPTED:
            found[event.unit.prompt_id] = event.value
        elif outcome is Outcome.VIOLATION:
            return f"{event.worker} has other rewards for {event.unit.id} than {ledger.finisher(event.unit.id)}"
    return ""


class Evaluator:
    def __init__(self, config: Config, fleet: Fleet, folder: RunFolder, telemetry: Telemetry, rollout: Rollout) -> None:
        self._config = config
        self._fleet = fleet
        self._folder = folder
        self._telemetry = telemetry
        self._rollout = rollout

    def run(
        self,
        policy: str,
        updates: int,
        prompts: Sequence[Prompt],
        embeddings: Mapping[str, Any],
        *,
        holder: str = "",
        overlaps: bool = False,
    ) -> EvaluationMetrics:
        """Evaluate what the regenerators hold as `policy` (``base``, ``ema``), or ``real`` pictures.

        Args:
            updates: updates done so far; also the revision that the regenerators hold.
            embeddings: prompt id → reference of its embedding.
            holder: the policy that the regenerators were given, if not that of `UNIT_POLICY`.
            overlaps: whether learners are at work meanwhile, whose stage it is then.
        """
        started = time.monotonic()
        if not overlaps:
            self._telemetry.state(f"evaluating {policy}", stage="evaluate")
        by_id = {prompt.id: prompt for prompt in prompts}
        units = evaluation_units(self._config, prompts, updates=updates, policy=holder or UNIT_POLICY[policy])
        pictured = self._pictured(prompts)

        def arguments(unit: WorkUnit) -> tuple[Any, ...]:
            prompt = by_id[unit.prompt_id]
            embedding = () if policy == "real" else (embeddings[prompt.id],)
            return prompt, *embedding, prompt in pictured

        method = "score_reference" if policy == "real" else "evaluate"
        strict = self._config.fleet.strict
        found = collect(self._fleet, self._telemetry, units, method, arguments, self._rollout, strict=strict)
        images = {key: evaluated.images for key, evaluated in found.answers.items() if evaluated.images is not None}
        metrics = evaluation_metrics(
            {prompt.id: found.answers[prompt.id].rewards for prompt in prompts},
            updates=updates,
            policy=policy,
            seconds=time.monotonic() - started,
            captions={p.id: p.text for p in pictured},
            overlapped=overlaps,
            duplicates=found.duplicates,
            differing=found.differing,
        )
        self._keep(metrics, images, pictured)
        return metrics

    def _pictured(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        return prompts[: self._config.evaluation.pictures]

    def _keep(self, metrics: EvaluationMetrics, images: Mapping[str, torch.Tensor], pictured: Sequence[Prompt]) -> None:
        """Write the pictures first: metrics that are there have their pictures."""
        folder = self._folder.evaluations / f"updates-{metrics.iteration:06d}-{metrics.policy}"
        pictures = {(p.id, sample): image for p in pictured for sample, image in enumerate(images[p.id])}
        with self._telemetry.disk.work("writing an evaluation"):
            save_pictures(folder, pictures)
            self._folder.save_evaluation(metrics)
        self._telemetry.evaluation(metrics, [list(images[p.id]) for p in pictured])
