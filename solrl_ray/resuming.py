"""Where a run goes on: the newest checkpoint that holds, and what was measured up to it."""

from __future__ import annotations

from dataclasses import dataclass

from solrl_ray.errors import RunError, UserError
from solrl_ray.learning.state import LearnerState
from solrl_ray.metrics import EvaluationMetrics, IterationMetrics
from solrl_ray.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    updates: int
    """Updates done; also the next iteration."""
    state: LearnerState | None
    """None at the very start."""
    iterations: list[IterationMetrics]
    evaluations: list[EvaluationMetrics]
    seconds: float
    """Wall seconds that the run has taken before, as far as its metrics tell."""


def resume_point(folder: RunFolder) -> ResumePoint:
    """Find it, and drop metrics of work that will be done again. A new run begins at 0.

    Raises:
        RunError: metrics of an iteration that a checkpoint contains are missing.
    """
    updates, state = _newest(folder)
    folder.rewind_metrics(updates)
    iterations: list[IterationMetrics] = []
    evaluations: list[EvaluationMetrics] = []
    for record in folder.read_metrics():
        values = {name: value for name, value in record.items() if name != "event"}
        if record["event"] == "iteration":
            iterations.append(IterationMetrics(**values))
        else:
            evaluations.append(EvaluationMetrics(**values))
    if [m.iteration for m in iterations] != list(range(updates)):
        raise RunError(
            f"{folder.metrics} has iterations {[m.iteration for m in iterations]}, "
            f"but the newest checkpoint is after {updates} updates"
        )
    seconds = sum(m.seconds["total"] for m in iterations) + sum(e.seconds for e in evaluations)
    return ResumePoint(updates=updates, state=state, iterations=iterations, evaluations=evaluations, seconds=seconds)


def _newest(folder: RunFolder) -> tuple[int, LearnerState | None]:
    """The newest checkpoint that verifies; damaged ones are passed over, unless all are."""
    damaged: list[str] = []
    for updates, path in reversed(folder.checkpoints()):
        try:
            return updates, LearnerState.load(path)
        except UserError as error:
            damaged.append(str(error))
    if damaged:
        raise UserError(f"no checkpoint of {folder.path} can be read: {damaged[0]}")
    return 0, None
