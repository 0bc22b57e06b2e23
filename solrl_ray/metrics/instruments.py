"""Table of all metrics that a live run exports to Prometheus; `docs/reference/metrics.md` shows the same table.

Ray adds the prefix ``ray_`` to each name, and the suffix ``_total`` to each counter, as is usual in Prometheus:
``solrl_candidates`` is scraped as ``ray_solrl_candidates_total``. Names and tags never change their meaning. Every
metric has the tag ``run``; the values of the other tags come from short, fixed lists, never from units or prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
"""Upper bounds of the histogram buckets, in seconds."""


@dataclass(frozen=True, slots=True)
class Instrument:
    name: str
    kind: Kind
    unit: str
    meaning: str
    tags: tuple[str, ...] = ()
    """Tags in addition to ``run``."""

    @property
    def scraped(self) -> str:
        """Name in Prometheus. The series of a histogram append ``_bucket``, ``_sum`` and ``_count``."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


INSTRUMENTS = (
    Instrument("solrl_iteration", "gauge", "iterations", "Current iteration, from 0; the planned number at the end."),
    Instrument("solrl_iterations_planned", "gauge", "iterations", "Planned iterations (`run.iterations`)."),
    Instrument("solrl_seconds_left", "gauge", "seconds", "Estimated time left, from the pace of the last iterations."),
    Instrument("solrl_stage_done", "gauge", "units", "Completed units of the current stage.", ("stage",)),
    Instrument("solrl_stage_planned", "gauge", "units", "Planned units of the current stage.", ("stage",)),
    Instrument("solrl_stage_seconds", "gauge", "seconds", "Wall time of each stage in the last iteration.", ("stage",)),
    Instrument("solrl_unit_seconds", "histogram", "seconds", "Compute time of one unit on its worker.", ("stage",)),
    Instrument("solrl_candidates", "counter", "candidates", "Previewed candidates, over finished iterations."),
    Instrument("solrl_samples", "counter", "samples", "Full-precision samples, over finished iterations."),
    Instrument("solrl_dropped", "gauge", "candidates", "Candidates whose preview was stopped early, so far."),
    Instrument("solrl_requeued_units", "gauge", "units", "Units given to another worker, so far."),
    Instrument("solrl_duplicate_results", "gauge", "results", "Duplicate results of a unit, so far."),
    Instrument("solrl_differing_results", "gauge", "results", "Duplicate results with different bytes, so far."),
    Instrument("solrl_reward_requests", "gauge", "requests", "Requests to reward servers and judges, so far."),
    Instrument("solrl_reward_retries", "gauge", "requests", "Retried requests to reward servers and judges, so far."),
    Instrument("solrl_reward_tokens", "gauge", "tokens", "Tokens that judges read and wrote, so far."),
    Instrument("solrl_reward_mean", "gauge", "reward", "Mean full-precision reward of the last iteration."),
    Instrument("solrl_proxy_reward_mean", "gauge", "reward", "Mean proxy reward of the last iteration."),
    Instrument("solrl_heldout_reward_mean", "gauge", "reward", "Mean reward on held-out prompts.", ("policy",)),
    Instrument("solrl_rank_fidelity", "gauge", "Spearman", "Spearman correlation of proxy and full-precision reward."),
    Instrument("solrl_loss", "gauge", "loss", "Loss of the last update."),
    Instrument("solrl_policy_loss", "gauge", "loss", "Policy objective in the loss of the last update."),
    Instrument("solrl_kl", "gauge", "mean square", "MSE between trained and reference velocity in the last update."),
    Instrument("solrl_gradient_norm", "gauge", "norm", "Global gradient norm of the last update, before clipping."),
    Instrument("solrl_alarm", "gauge", "0 or 1", "1 after a collapse, or outside the usual range.", ("measure",)),
    Instrument("solrl_workers", "gauge", "workers", "Workers by role and state.", ("role", "state")),
    Instrument("solrl_workers_lost", "gauge", "workers", "Workers lost and replaced, so far.", ("role",)),
    Instrument("solrl_refused_answers", "gauge", "answers", "Invalid results that were refused, so far.", ("role",)),
    Instrument("solrl_replacements_left", "gauge", "workers", "Replacements left of `fleet.max_replacements`."),
    Instrument("solrl_attested_workers", "gauge", "workers", "Workers by role and attested tier.", ("role", "tier")),
    Instrument(
        "solrl_revision", "gauge", "revision", "Newest revision that a worker of the role has loaded.", ("role",)
    ),
    Instrument(
        "solrl_receipts", "counter", "receipts", "Accepted proofs that a worker has loaded a revision.", ("role",)
    ),
    Instrument("solrl_weights_wait_share", "gauge", "share", "Share of the explorers' time spent waiting for weights."),
    Instrument(
        "solrl_weights_wait_seconds", "histogram", "seconds", "Time that a worker waited for a revision.", ("role",)
    ),
)
