"""Measurements of a run: records of ``metrics.jsonl`` (one per line), events, and the progress of a live run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationMetrics:
    """Metrics of one iteration.

    With a two-stage strategy, the ``proxy`` reward is the reward of the previews. It ranks seeds; the model never
    trains on it. Rewards are in the units of the configured reward, seconds are wall-clock time.
    """

    iteration: int
    """Number of the iteration, from 0."""
    revision: int
    """Policy revision that the samples come from; equals `iteration`."""
    seconds: dict[str, float]
    """Wall-clock seconds per stage.

    ``explore`` and ``regenerate`` overlap; each is measured from its first start to its last end. ``learn``: the
    update. ``publish``: publishing the iteration's revision, until the first worker that loaded and proved it has work.
    ``checkpoint``: saving the state from the iteration's start, in the background. ``total``: from the end of the
    previous update to the end of this one. With staleness, ``ahead`` is the exploration before the regenerators had the
    iteration's revision, and ``explore`` is the remaining exploration.
    """
    busy_seconds: dict[str, float]
    """Compute seconds per stage, summed over workers."""
    candidates: int
    """Candidates (prompts × seeds of the pool) that were scored or dropped."""
    expected_candidates: int
    """`candidates` according to the configuration: ``rollout.prompts`` × ``rollout.pool``."""
    samples: int
    """Samples that the model was trained on."""
    expected_samples: int
    """`samples` according to the configuration: ``rollout.prompts`` × ``rollout.keep``."""
    requeued_units: int
    """Units given to another worker because their result was lost or refused."""
    duplicate_results: int
    """Results for units that already had one. They are compared with the accepted result and discarded."""
    reward_mean: float
    """Mean reward of the samples that the model was trained on."""
    reward_std: float
    """Standard deviation of the reward over the same samples."""
    proxy_reward_mean: float
    """Mean reward of the whole pool, as used for ranking: rewards of the previews, or of all samples in one stage."""
    loss: float
    """Loss of the update, as minimised by the learner."""
    policy_loss: float
    """The part of `loss` that comes from the policy objective."""
    kl: float
    """KL term of the loss before its weight: mean squared difference between trained and reference velocity, which GRPO
    scales per step.
    """
    gradient_norm: float
    """Global L2 norm of the gradient before clipping."""
    spearman: float | None
    """Spearman correlation of preview and full-precision reward over the regenerated seeds of a prompt, averaged over
    prompts. This field and the next two are None with a one-stage strategy, which has no previews.
    """
    kendall: float | None
    """Kendall's tau between the same rewards, averaged over prompts."""
    side_agreement: float | None
    """Share of regenerated seeds that fall in the same half (better or worse) under both rewards; chance is 0.5."""
    selection_digest: str
    """SHA-256 (hex) of the seeds selected for each prompt."""
    lora_digest: str
    """SHA-256 (hex) of the LoRA weights after the update."""
    staleness: int = 0
    """Number of revisions by which the explorers were behind `revision`."""
    passes: int = 0
    """Forward and backward passes of learner rank 0."""
    expected_passes: int = 0
    """`passes` according to the configuration."""
    publication: dict[str, float] = field(default_factory=dict)
    """Publication of the exploring revision to the explorers.

    * ``bytes``: size of the payload
    * ``packed``: 1 if the weights were sent quantised, else 0
    * ``bumped``: number of modules whose amax grew
    * ``resyncs``: number of workers that had to load the revision again
    * ``load_seconds``: load time of the slowest worker
    """
    ratio_mean: float | None = None
    """Mean probability ratio of the trained to the sampling policy; None if the objective uses no ratio."""
    ratio_deviation: float | None = None
    """Largest abs(ratio - 1) of the update."""
    first_ratio_deviation: float | None = None
    """Largest abs(ratio - 1) in the first optimiser step. Expected: 0, because the trained policy still equals the
    sampling policy.
    """
    clip_fraction: float | None = None
    """Share of samples and passes whose ratio or velocity was outside the clip range; None if the objective does not
    clip. Expected: 0 with one optimiser step and a copied sampling policy.
    """
    differing_results: int = 0
    """Duplicate results whose bytes differ from the accepted result, which breaks reproducibility. With `fleet.strict`
    the first one ends the run.
    """
    weights_wait: float = 0.0
    """Share of the explorers' time in this iteration that was spent waiting for weights and nothing else: from the
    offer of a revision, or the end of an explorer's last unit, until the explorer has loaded and proved the revision.
    """
    dropped: int = 0
    """Candidates whose preview was stopped early because its early score was neither among the best nor the worst."""
    expected_dropped: int = 0
    """`dropped` according to the configuration."""
    reward_costs: dict[str, int] = field(default_factory=dict)
    """Use of reward servers and judges: ``requests`` (retries included), ``retries``, and for judges ``prompt_tokens``
    and ``completion_tokens``. Empty if the rewards use neither.
    """
    constant_groups: int = 0
    """Prompts whose samples all have the same reward. Their advantages are 0, so they teach the model nothing."""
    constant_pools: int = 0
    """Prompts whose completed previews all have the same reward, so that seeds were chosen by number, not by reward."""
    alarms: dict[str, float] = field(default_factory=dict)
    """``kl`` or ``gradient_norm``, if above its usual range → upper end of that range (`evaluation.stability`)."""
    rollback: int | None = None
    """Number of updates of the checkpoint that the run rolled back to after this iteration (`run.on_collapse`); None
    without a rollback.
    """
    event: str = field(default="iteration", init=False)
    """Kind of the line in ``metrics.jsonl``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMetrics:
    """Held-out reward of one policy at fixed addresses."""

    iteration: int
    """Number of policy updates before the evaluation."""
    policy: str
    """``base`` (adapters off), ``ema`` (moving average of the trained weights) or ``real`` (real images)."""
    reward_mean: float
    """Mean over prompts of each prompt's mean reward."""
    reward_stderr: float
    """Standard error of `reward_mean` over prompts."""
    rewards: dict[str, tuple[float, ...]]
    """Prompt id → rewards of its samples, in the order of their fixed seeds."""
    seconds: float
    """Wall-clock seconds of the evaluation."""
    captions: dict[str, str] = field(default_factory=dict)
    """Prompt id → text, at least for the prompts whose images are kept; the report shows the text."""
    overlapped: bool = False
    """True if an update ran at the same time. `seconds` is then part of that iteration's ``total``."""
    reward_costs: dict[str, int] = field(default_factory=dict)
    """Use of reward servers and judges, with the keys of `IterationMetrics.reward_costs`."""
    fall: dict[str, float] = field(default_factory=dict)
    """Empty, unless the reward fell below the best earlier evaluation by more than its error explains
    (`evaluation.stability`). Then ``by``: the mean difference; ``allowed``: the largest difference that still counts as
    error; ``best``: number of updates of the best evaluation.
    """
    event: str = field(default="evaluation", init=False)
    """Kind of the line in ``metrics.jsonl``."""


EVENTS_SHOWN = 4
"""Number of newest events that a terminal shows."""
EventKind = Literal["lost", "strike", "violation", "collapse", "warning", "note", "end"]
"""``lost``: a process died, and the run's reaction; ``strike``: a worker's result was refused; ``violation``: a
repeated unit gave different bytes; ``collapse``: the held-out reward fell, or the run rolled back; ``end``: the reason
why a command ended before its run was complete; ``warning`` and ``note``: anything else for the user.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run, outside its normal course: a line of ``events.jsonl``."""

    time: str
    """UTC, ISO 8601."""
    iteration: int
    """Number of the iteration at that time, from 0."""
    kind: EventKind
    what: str
    """Description: one sentence."""

    @classmethod
    def now(cls, iteration: int, kind: EventKind, what: str) -> Event:
        return cls(time=datetime.now(UTC).isoformat(timespec="seconds"), iteration=iteration, kind=kind, what=what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A snapshot of a live run, for the terminal view and `solrl status`."""

    run: str
    state: str
    """Current activity in words: ``starting explorers``, ``exploring``, ``learning``, ``done``, …"""
    iteration: int
    """Number of the current iteration, from 0; equals `iterations` when all are complete."""
    iterations: int
    """Number of planned iterations."""
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Stage (``evaluate``, ``explore``, ``regenerate``, ``learn``, ``publish``) → (completed, total) units."""
    train_rewards: tuple[float, ...] = ()
    """Mean reward of the samples that the model was trained on, per finished iteration."""
    heldout: tuple[tuple[int, str, float, float], ...] = ()
    """(updates, policy, mean reward, standard error) per evaluation."""
    spearman: tuple[float, ...] = ()
    """Rank fidelity (`IterationMetrics.spearman`) per finished iteration that has one."""
    workers: dict[str, str] = field(default_factory=dict)
    """Worker name → its state or current unit."""
    notes: dict[str, str] = field(default_factory=dict)
    """Actor name → its step inside a long call, such as ``loading transformer``. Includes actors that are not in
    `workers`.
    """
    events: tuple[Event, ...] = ()
    """The requested events, oldest first."""

    @property
    def messages(self) -> tuple[str, ...]:
        """The sentences of `events`."""
        return tuple(event.what for event in self.events)

    alarm: str = ""
    """The problem with the newest evaluation or iteration, as a sentence; empty if there is none."""
    elapsed: float = 0.0
    """Wall-clock seconds of the run, counted like `Summary.seconds`; before a resume, `measured_seconds`."""
    remaining: float | None = None
    """Estimated seconds left, from the pace of finished iterations; None before the first one has ended."""


def added(costs: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum of all costs, per name."""
    total: Counter[str] = Counter()
    for cost in costs:
        total.update(cost)
    return dict(total)


def measured_seconds(iterations: Iterable[IterationMetrics], evaluations: Iterable[EvaluationMetrics]) -> float:
    """Wall-clock seconds of a run according to its records. Excludes start-up and work that was lost."""
    alone = sum(record.seconds for record in evaluations if not record.overlapped)
    return sum(record.seconds["total"] for record in iterations) + alone
