"""Finds where a run continues (the newest valid checkpoint, the measurements up to it), and refuses other prompts than
it began with.

What its configuration may change is decided by `solrl_ray.storage.continuation`.
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

if TYPE_CHECKING:  # takes seconds; what is checked before a plan does not need it
    from solrl_ray.learning.state import LearnerState


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    updates: int
    """Updates done; also the next iteration."""
    state: LearnerState | None
    """None at the very start."""
    iterations: list[IterationMetrics]
    evaluations: list[EvaluationMetrics]
    seconds: float
    """Wall seconds of the run so far, from its metrics."""
    notes: tuple[str, ...] = ()
    """For the user: damaged checkpoints that were passed over."""


def resume_point(folder: RunFolder, *, iterations: int, init: str = "", staleness: int = 0) -> ResumePoint:
    """Find it, and drop what lies beyond it. A new run begins at 0.

    Args:
        iterations: total of the run.
        init: what the run was warm-started from, which means that it has a checkpoint of 0 updates.
        staleness: `rollout.max_staleness`.

    Raises:
        UserError: more updates than `iterations` were made, or the warm start was never written to the folder. Nothing
            was dropped.
        RunError: metrics of an iteration in a checkpoint are missing. Nothing was dropped.
    """
    updates, state, notes = newest_state(folder.checkpoints(), folder.path)
    folder.check_length(iterations, updates)
    if init and state is None:
        raise UserError(f"{folder.path} lacks its initial state, from {init}; start the run again")
    measured, evaluations = _measured(folder, updates)
    # In this order: a checkpoint that could not be read may be readable next time, and needs its metrics.
    folder.drop_beyond(updates, staleness=staleness)
    folder.rewind_metrics(updates)
    seconds = measured_seconds(measured, evaluations)
    return ResumePoint(
        updates=updates, state=state, iterations=measured, evaluations=evaluations, seconds=seconds, notes=notes
    )


def check_readable(folder: RunFolder, config: Config) -> None:
    """What a resumed run reads besides checkpoints and journals; changes nothing.

    Raises UserError: a damaged file, other prompts than the run began with, more updates than `run.iterations`.
    """
    folder.check_length(config.run.iterations, max((updates for updates, _ in folder.checkpoints()), default=0))
    folder.read_metrics()
    folder.starts()
    if folder.prompts.is_file():
        check_prompts(folder, config)


def check_prompts(folder: RunFolder, config: Config) -> dict[str, list[Prompt]]:
    """Record a run's prompts when it begins, and return them: ``train``, and the evaluated ones of ``heldout``.

    Raises UserError if it began with others: each iteration's choice, and the meaning of evaluation rewards, would
    change silently.
    """
    shapes = config.model.shapes
    used = {
        "train": read_prompts(config.prompts.train, "prompts.train", shapes),
        "heldout": read_prompts(config.prompts.heldout, "prompts.heldout", shapes)[: config.evaluation.prompts],
    }
    now = {part: {"prompts": len(found), "digest": prompts_digest(found)} for part, found in used.items()}
    if not folder.prompts.is_file():
        replace_file(folder.prompts, json.dumps(now, indent=1).encode())
        return used
    mend = "remove it, if the prompts are those that the run began with"
    was = read_json(folder.prompts, mend)
    parts = was.values() if isinstance(was, dict) and was.keys() == now.keys() else (None,)
    if not all(isinstance(part, dict) and "prompts" in part for part in parts):
        raise UserError(f"{folder.prompts} does not say what the run began with; {mend}.")
    for part in (part for part in now if now[part] != was[part]):
        raise UserError(
            f"prompts.{part} is {getattr(config.prompts, part)!r}, whose prompts are not those that the run in "
            f"{folder.path} began with ({was[part]['prompts']} then, {now[part]['prompts']} now, by texts, pictures "
            f"and order); put the file back, or begin another run with --from {folder.path}"
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
