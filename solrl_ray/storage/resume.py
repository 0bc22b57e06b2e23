"""Finds the point where a run resumes: its newest valid checkpoint and the metrics up to it. Also checks its prompts.

`solrl_ray.storage.continuation` decides which configuration keys may change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from solrl_ray.common.files import read_json, replace_file
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics, measured_seconds
from solrl_ray.prompts.prompt_set import prompts_digest, read_prompts
from solrl_ray.records import Prompt
from solrl_ray.storage.checkpoints import newest_state
from solrl_ray.storage.run_folder import RunFolder

if TYPE_CHECKING:  # importing it takes seconds, and the checks before a plan do not need it
    from solrl_ray.learning.state import LearnerState


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The point where a run starts or continues."""

    updates: int
    """Number of updates made; also the number of the next iteration."""
    state: LearnerState | None
    """Learner state of the checkpoint; None for a new run without warm start."""
    iterations: list[IterationMetrics]
    evaluations: list[EvaluationMetrics]
    seconds: float
    """Wall-clock seconds of the run so far, from its metrics."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about damaged checkpoints that were skipped."""


def resume_point(folder: RunFolder, *, iterations: int, init: str = "", staleness: int = 0) -> ResumePoint:
    """Find the point where the run continues, and remove files from after it. A new run begins at 0 updates.

    Args:
        iterations: planned iterations of the run.
        init: `run.init`. If not empty, the run must have a checkpoint of 0 updates.
        staleness: `rollout.max_staleness`.

    Raises:
        UserError: more updates than `iterations` were made, or the warm start was never written to the folder. No file
            is removed.
        RunError: metrics of an iteration before the checkpoint are missing. No file is removed.
    """
    updates, state, notes = newest_state(folder.checkpoints(), folder.path)
    folder.check_length(iterations, updates)
    if init and state is None:
        raise UserError(f"{folder.path} has no checkpoint of its initial state (from {init}); start the run again")
    measured, evaluations = _measured(folder, updates)
    # In this order: a checkpoint that could not be read now may be readable later, and then needs its metrics.
    folder.drop_beyond(updates, staleness=staleness)
    folder.rewind_metrics(updates)
    seconds = measured_seconds(measured, evaluations)
    return ResumePoint(
        updates=updates, state=state, iterations=measured, evaluations=evaluations, seconds=seconds, notes=notes
    )


def check_readable(folder: RunFolder, config: Config) -> None:
    """Check all files that a resumed run reads, except checkpoints and journals. Changes nothing.

    Raises UserError if a file is damaged, if the prompts are not those that the run began with, or if more updates were
    made than `run.iterations`.
    """
    folder.check_length(config.run.iterations, max((updates for updates, _ in folder.checkpoints()), default=0))
    folder.read_metrics()
    folder.starts()
    if folder.prompts.is_file():
        check_prompts(folder, config)


def check_prompts(folder: RunFolder, config: Config) -> dict[str, list[Prompt]]:
    """Read the prompts of a run: ``train``, and those of ``heldout`` that are evaluated. Record them if the run begins.

    Raises UserError if the run began with other prompts. They would silently change which prompts an iteration chooses,
    and what evaluation rewards mean.
    """
    shapes = config.model.shapes
    used = {
        "train": read_prompts(config.prompts.train, "prompts.train", shapes),
        "heldout": read_prompts(config.prompts.heldout, "prompts.heldout", shapes)[: config.evaluation.prompts],
    }
    now = {name: {"prompts": len(prompts), "digest": prompts_digest(prompts)} for name, prompts in used.items()}
    if not folder.prompts.is_file():
        replace_file(folder.prompts, json.dumps(now, indent=1).encode())
        return used
    fix = "remove it, if the prompts are those that the run began with"
    was = read_json(folder.prompts, fix)
    entries = was.values() if isinstance(was, dict) and was.keys() == now.keys() else (None,)
    if not all(isinstance(entry, dict) and "prompts" in entry for entry in entries):
        raise UserError(f"{folder.prompts} does not contain the prompts that the run began with; {fix}.")
    for name in (name for name in now if now[name] != was[name]):
        raise UserError(
            f"prompts.{name} is {getattr(config.prompts, name)!r}, whose prompts are not those that the run in "
            f"{folder.path} began with ({was[name]['prompts']} then, {now[name]['prompts']} now; texts, images and "
            f"order must be the same). Restore the file, or begin another run with --from {folder.path}"
        )
    return used


def _measured(folder: RunFolder, updates: int) -> tuple[list[IterationMetrics], list[EvaluationMetrics]]:
    records = folder.read_metrics_until(updates)
    iterations = [record for record in records if isinstance(record, IterationMetrics)]
    evaluations = [record for record in records if isinstance(record, EvaluationMetrics)]
    if [m.iteration for m in iterations] != list(range(updates)):
        raise RunError(
            f"{folder.metrics} has iterations {[m.iteration for m in iterations]}, "
            f"but the newest checkpoint is after {updates} updates"
        )
    return iterations, evaluations
