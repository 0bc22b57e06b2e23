"""Assembles the metrics record of a finished iteration from the reports of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from solrl_ray.config.schema import Config
from solrl_ray.config.selection_rules import RULES
from solrl_ray.config.strategies import is_one_stage, previews
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.planning.update import backwards
from solrl_ray.rollout.rank_fidelity import rank_fidelity
from solrl_ray.rollout.selection import selection_digest
from solrl_ray.scheduling.iteration_state import IterationSummary, staleness_of

_LOSSES = ("loss", "policy_loss", "kl", "gradient_norm", "passes")
_RATIOS = ("ratio_mean", "ratio_deviation", "first_ratio_deviation", "clip_fraction")
"""Fields that are copied from `UpdateMetrics` under the same names."""


def iteration_metrics(
    config: Config,
    *,
    iteration: int,
    summary: IterationSummary,
    rewards: Sequence[tuple[float, ...]],
    update: UpdateMetrics,
    seconds: dict[str, float],
    busy_seconds: dict[str, float],
    publication: Mapping[str, float] | None = None,
    requeued: int = 0,
    reward_costs: Mapping[str, int] | None = None,
    weights_wait: float = 0.0,
) -> IterationMetrics:
    """The record of an iteration, without `lora_digest`, which is computed later from the state after the update.

    Args:
        summary: the selector's summary of the iteration.
        rewards: rewards of the samples trained on, per prompt, in prompt and selection order.
        update: metrics of the update.
        seconds: wall-clock seconds per stage.
        busy_seconds: compute seconds per stage, summed over workers.
        publication: metrics of publishing the exploring revision.
        requeued: units given to another worker because a result was lost or refused.
        reward_costs: use of reward servers and judges.
        weights_wait: share of the explorers' time spent waiting for weights.
    """
    full = np.array(rewards, dtype=np.float64)
    preview = None if is_one_stage(config) else previews(config)
    compared = np.array(summary.rewards, dtype=np.float64)
    # Proxy rewards of the selected seeds, [prompts, K], in prompt and selection order.
    proxies = np.array([[c.reward for c in s.chosen] for s in summary.selections], dtype=np.float64)
    fidelity = None if is_one_stage(config) else rank_fidelity(proxies, compared)
    rollout, counts = config.rollout, summary.counts
    return IterationMetrics(
        iteration=iteration,
        revision=iteration,
        staleness=staleness_of(iteration, rollout.max_staleness),
        seconds=seconds,
        busy_seconds=busy_seconds,
        candidates=counts.candidates,
        expected_candidates=rollout.prompts * rollout.pool,
        samples=full.size,
        expected_samples=rollout.prompts * rollout.keep,
        requeued_units=requeued,
        reward_costs=dict(reward_costs or {}),
        duplicate_results=counts.duplicates,
        differing_results=counts.violations,
        reward_mean=float(full.mean()),
        reward_std=float(full.std()),
        proxy_reward_mean=summary.proxy_mean,
        spearman=fidelity.spearman if fidelity else None,
        kendall=fidelity.kendall if fidelity else None,
        side_agreement=fidelity.side_agreement if fidelity else None,
        selection_digest=selection_digest(summary.selections),
        lora_digest="",
        expected_passes=backwards(config),
        publication=dict(publication or {}),
        weights_wait=weights_wait,
        dropped=counts.dropped,
        expected_dropped=rollout.prompts * (rollout.pool - preview.kept) if preview else 0,
        constant_groups=_constant_rows(compared),
        constant_pools=_constant_rows(proxies) if preview and RULES[rollout.selection].keeps_ends else 0,
        **{name: getattr(update, name) for name in (*_LOSSES, *_RATIOS)},
    )


def _constant_rows(rewards: np.ndarray) -> int:
    """Number of rows of `rewards`, [prompts, K], in which all values are equal."""
    return int((rewards.min(axis=1) == rewards.max(axis=1)).sum())
