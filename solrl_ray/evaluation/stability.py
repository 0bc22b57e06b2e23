"""Detects collapse and instability of a run.

Decisions depend only on the run's records, so a resumed run makes the same ones.

* A *fall* of the held-out reward is a collapse: the trained policy is worse than the best evaluated one by more than
  the error of the difference explains. The difference is paired over prompts at the same addresses.
* The KL term and the gradient norm have a *usual range*, computed with a robust statistic from the run so far. Leaving
  it is an early sign, not yet harm.

docs/decisions/collapse.md explains the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from solrl_ray.config.problems import counted
from solrl_ray.evaluation.paired_gain import paired_gain
from solrl_ray.evaluation.student import student_quantile
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics

FALSE_FALLS = 1e-4
"""False positive rate of a fall, per evaluation. Low, because a run compares dozens of evaluations with the best of
many.
"""
RECENT = 3
"""Number of newest iterations whose median is compared with the usual range, so that one spike raises no alarm."""
LEAST = 10
"""Minimum number of earlier iterations for a usual range."""
DEVIATIONS = 6.0
"""Distance of the range's upper end from the median, in robust standard deviations (1.4826 × median absolute
deviation).
"""
NARROWEST = 0.05
"""Minimum standard deviation as a share of the median, so that values that hardly vary do not alarm at any change."""
MEASURES = {"kl": "the KL term", "gradient_norm": "the gradient norm"}
"""Field of `IterationMetrics` → its name in a sentence."""


def best(evaluations: Sequence[EvaluationMetrics], *, trained: bool = False) -> EvaluationMetrics | None:
    """The evaluation with the highest mean held-out reward; the earliest of equal ones. None without evaluations.

    `trained`: exclude the base model. (In a run without warm start, the base counts as revision 0.)
    """
    candidates = [record for record in evaluations if record.policy == "ema"]
    if not trained and not any(record.iteration == 0 for record in candidates):
        candidates += [record for record in evaluations if record.policy == "base"]
    return max(candidates, key=lambda record: (record.reward_mean, -record.iteration), default=None)


def fall(before: Sequence[EvaluationMetrics], newest: EvaluationMetrics) -> dict[str, float]:
    """Compare `newest` with the best earlier evaluation.

    Returns:
        ``by``: mean paired difference; ``allowed``: `allowed_stderrs` × its standard error; ``best``: number of updates
        of the best evaluation. Empty if the difference is within the allowed range, if `newest` is not a trained
        policy, or with a single prompt.
    """
    top = best(before) if newest.policy == "ema" and newest.iteration else None
    if top is None or top.rewards.keys() != newest.rewards.keys():
        return {}
    change = paired_gain(top, newest)
    if change.stderr is None:
        return {}
    allowed = allowed_stderrs(len(newest.rewards)) * change.stderr
    if -change.mean <= allowed:
        return {}
    return {"by": -change.mean, "allowed": allowed, "best": top.iteration}


def allowed_stderrs(prompts: int) -> float:
    """Largest fall that still counts as chance, in standard errors of a paired difference over `prompts` prompts.

    Computed from Student's t for the false positive rate `FALSE_FALLS`.
    """
    return student_quantile(prompts - 1, 1 - 2 * FALSE_FALLS)


def describe_fall(record: EvaluationMetrics) -> str:
    """Describe the fall of an evaluation in a sentence without its full stop."""
    by, allowed, top = record.fall["by"], record.fall["allowed"], int(record.fall["best"])
    return (
        f"held-out reward after {record.iteration} updates is {by:.4f} lower than after {top}, where it was best; "
        f"a difference of up to {allowed:.4f} could be chance"
    )


def alarms(before: Sequence[IterationMetrics], newest: IterationMetrics) -> dict[str, float]:
    """Measure → upper end of its usual range, for those of `MEASURES` that are now above it."""
    exceeded = {}
    for name in MEASURES:
        values = [getattr(record, name) for record in (*before, newest)]
        limit = _upper_end(values[:-RECENT])
        if limit is not None and median(values[-RECENT:]) > limit:
            exceeded[name] = limit
    return exceeded


def describe_alarms(record: IterationMetrics) -> str:
    """Describe the alarms of an iteration in a sentence without its full stop."""
    measures = [
        f"{MEASURES[name]} ({getattr(record, name):.3g}, usually up to {x:.3g})" for name, x in record.alarms.items()
    ]
    return f"in iteration {record.iteration + 1}, {' and '.join(measures)} left the usual range of the run"


def news(before: Sequence[IterationMetrics], newest: IterationMetrics) -> str:
    """Describe the newest iteration if a measure has just left its usual range; else empty."""
    last = before[-1].alarms if before else {}
    return describe_alarms(newest) if newest.alarms.keys() - last.keys() else ""


def alarm(iterations: Sequence[IterationMetrics], evaluations: Sequence[EvaluationMetrics]) -> str:
    """The current problem: a fall in the newest evaluation, alarms of the newest iteration, or both. Empty if none."""
    falls = [describe_fall(record) for record in evaluations[-1:] if record.fall]
    return "; ".join([*falls, *(describe_alarms(record) for record in iterations[-1:] if record.alarms)])


def warnings(iterations: Sequence[IterationMetrics], evaluations: Sequence[EvaluationMetrics]) -> list[str]:
    """Warnings for readers of the run's results: the last fall, all rollbacks, and the first alarm."""
    fallen = [record for record in evaluations if record.fall]
    sentences = [f"Collapse: {describe_fall(fallen[-1])}."] if fallen else []
    rollbacks = [
        f"after iteration {record.iteration + 1} to the state after {counted(record.rollback, 'update')}"
        for record in iterations
        if record.rollback is not None
    ]
    if rollbacks:
        sentences.append(
            f"Rolled back {counted(len(rollbacks), 'time')}, halving the learning rate each time: "
            f"{', '.join(rollbacks)}."
        )
    alarmed = next((record for record in iterations if record.alarms), None)
    if alarmed is not None:
        sentences.append(f"Unusual: {describe_alarms(alarmed)}.")
    return sentences


def _upper_end(values: Sequence[float]) -> float | None:
    """Upper end of the usual range of `values`; None if there are fewer than `LEAST`."""
    if len(values) < LEAST:
        return None
    middle = median(values)
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return middle + DEVIATIONS * max(deviation, NARROWEST * abs(middle))
