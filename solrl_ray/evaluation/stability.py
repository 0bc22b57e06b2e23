"""Whether a run collapses or runs away, judged by its records alone, so that a resumed run judges the same.

* A *fall* of held-out reward is a collapse: the trained policy is worse than the best evaluated one, by more than the
  error of the difference allows. The difference is paired over prompts at the same addresses.
* KL term and gradient norm have a *usual range*, by a robust statistic of the run so far. Leaving it is a sign, and no
  harm yet.

docs/decisions/collapse.md says why these.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from solrl_ray.config.problems import counted
from solrl_ray.evaluation.paired_gain import paired_gain
from solrl_ray.evaluation.student import student_quantile
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics

FALSE_FALLS = 1e-4
"""Share of comparisons of equal policies that may be called a fall: a run makes dozens, each with the best of many."""
RECENT = 3
"""Newest iterations whose median is judged, so that a single spike is none."""
LEAST = 10
"""Iterations before them that a usual range needs."""
DEVIATIONS = 6.0
"""Standard deviations (1.4826 × the median absolute deviation) from the median to the range's upper end."""
NARROWEST = 0.05
"""Least standard deviation as a share of the median: values that hardly vary would make any change an alarm."""
MEASURES = {"kl": "the KL term", "gradient_norm": "the gradient norm"}
"""Field of `IterationMetrics` → its name in a sentence."""


def best(evaluations: Sequence[EvaluationMetrics], *, trained: bool = False) -> EvaluationMetrics | None:
    """The evaluation of the policy with the highest mean held-out reward; of equal ones the earliest.

    `trained`: leave out the base model, which is revision 0 of a run that was not warm-started.
    """
    found = [each for each in evaluations if each.policy == "ema"]
    if not trained and not any(each.iteration == 0 for each in found):
        found += [each for each in evaluations if each.policy == "base"]
    return max(found, key=lambda each: (each.reward_mean, -each.iteration), default=None)


def fall(before: Sequence[EvaluationMetrics], newest: EvaluationMetrics) -> dict[str, float]:
    """How far `newest` is under the best of the evaluations before it.

    Returns:
        ``by``: mean paired difference; ``allowed``: `allowed_stderrs` of its errors; ``best``: updates of the best one.
        Empty if it is not further than allowed, or no trained policy's, or there is only one prompt.
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
    """Standard errors of the paired difference over so many prompts that are no fall: Student's t of `FALSE_FALLS`."""
    return student_quantile(prompts - 1, 1 - 2 * FALSE_FALLS)


def describe_fall(record: EvaluationMetrics) -> str:
    """A sentence on an evaluation with a fall."""
    by, allowed, top = record.fall["by"], record.fall["allowed"], int(record.fall["best"])
    return (
        f"held-out reward after {record.iteration} updates is {by:.4f} lower than after {top}, where it was best; "
        f"the error of that difference allows {allowed:.4f}"
    )


def alarms(before: Sequence[IterationMetrics], newest: IterationMetrics) -> dict[str, float]:
    """Measure → the upper end of its usual range, for each of `MEASURES` that has left it."""
    found = {}
    for name in MEASURES:
        values = [getattr(record, name) for record in (*before, newest)]
        limit = _upper_end(values[:-RECENT])
        if limit is not None and median(values[-RECENT:]) > limit:
            found[name] = limit
    return found


def describe_alarms(record: IterationMetrics) -> str:
    """A sentence on an iteration with alarms."""
    left = [f"{MEASURES[name]} ({getattr(record, name):.3g}, usual up to {x:.3g})" for name, x in record.alarms.items()]
    return f"in iteration {record.iteration + 1} {' and '.join(left)} left the usual range of the run"


def news(before: Sequence[IterationMetrics], newest: IterationMetrics) -> str:
    """The sentence on an iteration in which a measure leaves its range that was inside before; else empty."""
    last = before[-1].alarms if before else {}
    return describe_alarms(newest) if newest.alarms.keys() - last.keys() else ""


def alarm(iterations: Sequence[IterationMetrics], evaluations: Sequence[EvaluationMetrics]) -> str:
    """What is wrong now: with the newest evaluation of the policy, or the newest iteration. Empty if nothing is."""
    fallen = [describe_fall(each) for each in evaluations[-1:] if each.fall]
    return "; ".join([*fallen, *(describe_alarms(each) for each in iterations[-1:] if each.alarms)])


def warnings(iterations: Sequence[IterationMetrics], evaluations: Sequence[EvaluationMetrics]) -> list[str]:
    """What a reader of the run's results must know: its last fall, what it went back to, and the first alarm."""
    fallen = [each for each in evaluations if each.fall]
    said = [f"Collapse: {describe_fall(fallen[-1])}."] if fallen else []
    went = [each for each in iterations if each.rollback is not None]
    back = [f"iteration {each.iteration + 1} to {each.rollback} updates" for each in went]
    if back:
        said.append(
            f"Went back {counted(len(back), 'time')}, with half of the step each time: after {', '.join(back)}."
        )
    alarmed = next((each for each in iterations if each.alarms), None)
    if alarmed is not None:
        said.append(f"Unusual: {describe_alarms(alarmed)}.")
    return said


def _upper_end(values: Sequence[float]) -> float | None:
    """Of the usual range of these values; None if they are too few."""
    if len(values) < LEAST:
        return None
    middle = median(values)
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return middle + DEVIATIONS * max(deviation, NARROWEST * abs(middle))
