"""A run's measurements: one line of ``metrics.jsonl`` per record, and the progress of a live run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationMetrics:
    """Metrics of one iteration. In two stages, the ``proxy`` reward comes from previews and is never learned from."""

    iteration: int
    revision: int
    seconds: dict[str, float]
    """Wall seconds by stage: ``explore``, ``regenerate`` (both from first start to last end, they overlap), ``learn``,
    ``publish`` (of the iteration's revision, until a worker that proved it had work), ``checkpoint`` (of the state that
    the iteration began with, written beside other work), ``total`` (from the update before to this one). With
    staleness, ``ahead`` is the exploring before regenerators had the iteration's revision, and ``explore`` the rest.
    """
    busy_seconds: dict[str, float]
    """Summed computing seconds of workers, by stage."""
    candidates: int
    expected_candidates: int
    samples: int
    expected_samples: int
    requeued_units: int
    duplicate_results: int
    reward_mean: float
    """Mean reward of the samples that are learned from."""
    reward_std: float
    proxy_reward_mean: float
    """Mean of the rewards that ranked the whole pool."""
    loss: float
    policy_loss: float
    kl: float
    gradient_norm: float
    spearman: float | None
    """Mean over prompts, proxy against full-precision reward, on the regenerated seeds. All three are None in one
    stage, without previews.
    """
    kendall: float | None
    side_agreement: float | None
    """Share of regenerated seeds on the same side (better or worse half) under both rewards."""
    selection_digest: str
    lora_digest: str
    staleness: int = 0
    """Revisions that the explorers were behind `revision`."""
    passes: int = 0
    """Forward and backward passes of learner rank 0."""
    expected_passes: int = 0
    publication: dict[str, float] = field(default_factory=dict)
    """Of the revision that explored, as explorers got it: ``bytes`` of the payload, ``packed`` (1 or 0), ``bumped``
    (modules whose amax grew), ``resyncs`` (workers that needed it again), ``load_seconds`` (the slowest worker's).
    """
    ratio_mean: float | None = None
    """Mean ratio of probabilities under the trained and the sampling policy; None if the objective has none."""
    ratio_deviation: float | None = None
    """Largest abs(ratio - 1)."""
    first_ratio_deviation: float | None = None
    """The same in the iteration's first optimiser step. Expected: 0, because the policy is still the sampling one."""
    clip_fraction: float | None = None
    """Share of samples and passes whose ratio, or velocity, was outside the clip range; None without one. With one
    optimiser step and a copied sampling policy: 0.
    """
    differing_results: int = 0
    """Repeated results with other bytes than the accepted ones: a broken promise, counted without `fleet.strict`."""
    weights_wait: float = 0.0
    """Share of the explorers' time in this iteration spent only waiting for weights: from the offer of a revision, or
    the end of their last unit, until they had proved it.
    """
    dropped: int = 0
    """Candidates whose previews were pruned, because their early scores were neither among the best nor the worst."""
    expected_dropped: int = 0
    reward_costs: dict[str, int] = field(default_factory=dict)
    """Of reward servers and judges: ``requests``, ``retries`` among them, and ``prompt_tokens`` and
    ``completion_tokens`` of judges. Empty without any.
    """
    constant_groups: int = 0
    """Prompts whose samples all have the same reward, so that their advantages are 0."""
    constant_pools: int = 0
    """Prompts whose finished previews all have the same reward, so that the numbers of their seeds chose among them."""
    alarms: dict[str, float] = field(default_factory=dict)
    """``kl`` or ``gradient_norm``, if it has left its usual range → that range's upper end (`evaluation.stability`)."""
    rollback: int | None = None
    """If the run went back after this iteration (`run.on_collapse`): updates of the checkpoint that it went back to."""
    event: str = field(default="iteration", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMetrics:
    """Held-out reward of one policy at fixed addresses."""

    iteration: int
    """Updates done when evaluated."""
    policy: str
    """``base`` (adapters off), ``ema`` or ``real`` (reference pictures)."""
    reward_mean: float
    reward_stderr: float
    """Standard error over prompts of the per-prompt means."""
    rewards: dict[str, tuple[float, ...]]
    """Prompt id → rewards of its fixed addresses."""
    seconds: float
    captions: dict[str, str] = field(default_factory=dict)
    """Prompt id → text, at least for the prompts with pictures; the report shows them."""
    overlapped: bool = False
    """Whether an update ran meanwhile; if so, an iteration's seconds contain these."""
    reward_costs: dict[str, int] = field(default_factory=dict)
    """As an iteration's."""
    fall: dict[str, float] = field(default_factory=dict)
    """If the reward is lower than its best before by more than the error allows (`evaluation.stability`): ``by``,
    ``allowed`` and ``best``, the updates of the best evaluation.
    """
    event: str = field(default="evaluation", init=False)


EVENTS_SHOWN = 4
"""The newest events, on a terminal."""
EventKind = Literal["lost", "strike", "violation", "collapse", "warning", "note", "end"]
"""``lost``: a process, and what follows from that; ``strike``: a refused answer; ``violation``: other bytes of a
repeated unit; ``collapse``: a fall of the held-out reward, a rollback; ``end``: why a command ended before its run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of ``events.jsonl``."""

    time: str
    """UTC, ISO 8601."""
    iteration: int
    """The present one, 0-based."""
    kind: EventKind
    what: str
    """A sentence."""

    @classmethod
    def now(cls, iteration: int, kind: EventKind, what: str) -> Event:
        return cls(time=datetime.now(UTC).isoformat(timespec="seconds"), iteration=iteration, kind=kind, what=what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A snapshot of a live run, for the terminal view and `solrl status`."""

    run: str
    state: str
    """What is going on now, in words: ``starting explorers``, ``exploring``, ``learning``, ``done``, …"""
    iteration: int
    """The present one, 0-based; `iterations` when all are done."""
    iterations: int
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Stage (``evaluate``, ``explore``, ``regenerate``, ``learn``, ``publish``) → (done, total) in units."""
    train_rewards: tuple[float, ...] = ()
    """Mean reward of the samples learned from, per finished iteration."""
    heldout: tuple[tuple[int, str, float, float], ...] = ()
    """(updates, policy, reward mean, standard error) per evaluation."""
    spearman: tuple[float, ...] = ()
    workers: dict[str, str] = field(default_factory=dict)
    """Worker name → state or present unit."""
    notes: dict[str, str] = field(default_factory=dict)
    """Actor → what it does in a long call: ``loading transformer``. Has some that `workers` lacks."""
    events: tuple[Event, ...] = ()
    """The requested ones, newest last."""

    @property
    def messages(self) -> tuple[str, ...]:
        """The sentences of `events`."""
        return tuple(event.what for event in self.events)

    alarm: str = ""
    """What is wrong with the newest evaluation or iteration; empty if nothing is."""
    elapsed: float = 0.0
    """Wall seconds of the run, as `Summary.seconds`; those before a resume by `measured_seconds`."""
    remaining: float | None = None
    """Estimate from the measured pace; None before the first iteration has ended."""


def added(costs: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name."""
    total: Counter[str] = Counter()
    for each in costs:
        total.update(each)
    return dict(total)


def measured_seconds(iterations: Iterable[IterationMetrics], evaluations: Iterable[EvaluationMetrics]) -> float:
    """Wall seconds of a run from its records: without its starts and lost work."""
    alone = sum(record.seconds for record in evaluations if not record.overlapped)
    return sum(record.seconds["total"] for record in iterations) + alone
