"""Scalars of a run for TensorBoard and other trackers.

Names never change. The step is the number of updates of the policy that was measured, so that training and held-out
rewards share one axis:

* ``reward/`` train, train_std, proxy, heldout_<policy>, heldout_<policy>_stderr
* ``rank_fidelity/`` spearman, kendall, side_agreement; only with previews
* ``learning/`` loss, policy_loss, kl, gradient_norm; for objectives with a probability ratio also ratio_mean,
  ratio_deviation, clip_fraction
* ``wall_seconds/<stage>``, ``busy_seconds/<stage>``
* ``counts/`` candidates, dropped, samples, requeued_units, duplicate_results
"""

from __future__ import annotations

from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics

SCALARS = {
    "reward/train": "reward_mean",
    "reward/train_std": "reward_std",
    "reward/proxy": "proxy_reward_mean",
    "rank_fidelity/spearman": "spearman",
    "rank_fidelity/kendall": "kendall",
    "rank_fidelity/side_agreement": "side_agreement",
    "learning/loss": "loss",
    "learning/policy_loss": "policy_loss",
    "learning/kl": "kl",
    "learning/gradient_norm": "gradient_norm",
    "learning/ratio_mean": "ratio_mean",
    "learning/ratio_deviation": "ratio_deviation",
    "learning/clip_fraction": "clip_fraction",
    "counts/candidates": "candidates",
    "counts/dropped": "dropped",
    "counts/samples": "samples",
    "counts/requeued_units": "requeued_units",
    "counts/duplicate_results": "duplicate_results",
    "wait_share/weights": "weights_wait",
}
"""Name of a curve → field of `IterationMetrics`. Fields that are None are not written."""


def iteration_scalars(record: IterationMetrics) -> dict[str, float]:
    """Name → value of the scalars of one iteration."""
    scalars = {name: getattr(record, field) for name, field in SCALARS.items()}
    per_stage = {"wall_seconds": record.seconds, "busy_seconds": record.busy_seconds}
    scalars |= {f"{name}/{stage}": value for name, values in per_stage.items() for stage, value in values.items()}
    return {name: float(value) for name, value in scalars.items() if value is not None}


def evaluation_scalars(record: EvaluationMetrics) -> dict[str, float]:
    """Name → value of the scalars of one evaluation."""
    name = f"reward/heldout_{record.policy}"
    return {name: record.reward_mean, f"{name}_stderr": record.reward_stderr}


def pictures_name(record: EvaluationMetrics) -> str:
    """Tag of the images of an evaluation: one contact sheet with one row per prompt."""
    return f"heldout/{record.policy}"
