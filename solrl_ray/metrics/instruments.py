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
    Instrument("solrl_iteration", "gauge", "iterations", "The present one, 0-based; the planned number at the end."),
    Instrument("solrl_iterations_planned", "gauge", "iterations", "`run.iterations`."),
    Instrument("solrl_seconds_left", "gauge", "seconds", "Time left by the pace of the last iterations."),
    Instrument("solrl_stage_done", "gauge", "units", "Done in the present iteration or evaluation.", ("stage",)),
    Instrument("solrl_stage_planned", "gauge", "units", "To be done in it.", ("stage",)),
    Instrument("solrl_stage_seconds", "gauge", "seconds", "Wall time of the last iteration's stages.", ("stage",)),
    Instrument("solrl_unit_seconds", "histogram", "seconds", "Computing time of one unit on its worker.", ("stage",)),
    Instrument("solrl_candidates", "counter", "candidates", "Previewed candidates of finished iterations."),
    Instrument("solrl_samples", "counter", "samples", "Full-precision samples of finished iterations."),
    Instrument("solrl_dropped", "gauge", "candidates", "Candidates whose preview was pruned, so far."),
    Instrument("solrl_requeued_units", "gauge", "units", "Units that went to another worker, so far."),
    Instrument("solrl_duplicate_results", "gauge", "results", "Repeated results, so far."),
    Instrument("solrl_differing_results", "gauge", "results", "Repeated results with other bytes, so far."),
    Instrument("solrl_reward_requests", "gauge", "requests", "Requests to reward servers and judges, so far."),
    Instrument("solrl_reward_retries", "gauge", "requests", "Repeated requests, so far."),
    Instrument("solrl_reward_tokens", "gauge", "tokens", "Tokens that judges read and wrote, so far."),
    Instrument("solrl_reward_mean", "gauge", "reward", "Mean full-precision reward of the last iteration's samples."),
    Instrument("solrl_proxy_reward_mean", "gauge", "reward", "Mean proxy reward of the last iteration's candidates."),
    Instrument("solrl_heldout_reward_mean", "gauge", "reward", "Mean reward on held-out prompts.", ("policy",)),
    Instrument("solrl_rank_fidelity", "gauge", "Spearman", "Proxy against full-precision rewards of chosen seeds."),
    Instrument("solrl_loss", "gauge", "loss", "Loss of the last update."),
    Instrument("solrl_policy_loss", "gauge", "loss", "Its policy part."),
    Instrument("solrl_kl", "gauge", "mean square", "MSE between trained and reference velocity in the last update."),
    Instrument("solrl_gradient_norm", "gauge", "norm", "Global gradient norm of the last update, before clipping."),
    Instrument("solrl_alarm", "gauge", "0 or 1", "1: collapsed reward, or out of its usual range.", ("measure",)),
    Instrument("solrl_workers", "gauge", "workers", "Workers by state of their life.", ("role", "state")),
    Instrument("solrl_workers_lost", "gauge", "workers", "Workers lost and replaced, so far.", ("role",)),
    Instrument("solrl_refused_answers", "gauge", "answers", "Answers that could not be right, so far.", ("role",)),
    Instrument("solrl_replacements_left", "gauge", "workers", "What is left of `fleet.max_replacements`."),
    Instrument("solrl_attested_workers", "gauge", "workers", "Workers by attested tier.", ("role", "tier")),
    Instrument("solrl_revision", "gauge", "revision", "Newest revision that a worker of the role proved.", ("role",)),
    Instrument("solrl_receipts", "counter", "receipts", "Proofs of a loaded revision that were accepted.", ("role",)),
    Instrument("solrl_weights_wait_share", "gauge", "share", "Share of explorers' time spent waiting for weights."),
    Instrument("solrl_weights_wait_seconds", "histogram", "seconds", "Idle time of a worker per revision.", ("role",)),
)
