"""The state of one iteration: candidates, selections and finished sample groups. Pure.

Life of a prompt, in two stages and in one::

    explore units ──record──► all in? ──► Selection ──► a regenerate unit ──record_group──► finished
    sample units ───record──► all in? ──► Selection ──► a group of kept samples ──record_group──► finished

A prompt moves on as soon as its own units are in. The result depends only on the accepted results: arrival order,
retries and duplicates change nothing. `scheduling.dispatcher` assigns units to workers.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, pool_sampling, reward_weights, unreproducible_rewards
from solrl_ray.errors import RunError
from solrl_ray.records import Pruning, SampleGroup, Selection, UnitResult, WorkUnit
from solrl_ray.rollout.selection import BEST_AND_WORST, PromptSelection, SelectionRule, dropped
from solrl_ray.scheduling.ledger import Ledger, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPlan:
    """The work of one iteration, independent of workers."""

    iteration: int
    revision: int
    """The revision that samples the chosen seeds again."""
    staleness: int = 0
    """Number of revisions by which the explorers are behind `revision` (`staleness_of`)."""
    prompt_ids: tuple[str, ...]
    pool: int
    keep: int
    unit: int
    """Candidates per unit of a pool; divides `pool`."""
    selection: SelectionRule = BEST_AND_WORST
    one_stage: bool = False
    """True: the learner trains on the pool's samples. False: the chosen seeds are sampled again at full precision."""
    policy_digest: str = ""
    """LoRA digest of the exploring policy: a journal of the same revision with other bytes is not continued."""
    score_class: str = ""
    """Score class of the samplers. Scores of different classes are never mixed, not even after a resume."""
    prune: Pruning | None = None
    """Pruning of each unit of a pool; None if all candidates are sampled to the end."""
    reproducible: bool = True
    """Whether scores are reproducible. If not, the first score counts, and repeated results are compared by their
    samples only.
    """

    @property
    def exploring_revision(self) -> int:
        """The revision that samples the pools."""
        return self.revision - self.staleness

    def pool_units(self) -> list[WorkUnit]:
        """All units of all pools, ordered by prompt, so that the first prompts complete early."""
        return [unit for prompt_id in self.prompt_ids for unit in self.pool_units_of(prompt_id)]

    def pool_units_of(self, prompt_id: str) -> list[WorkUnit]:
        return [
            WorkUnit(
                stage="sample" if self.one_stage else "explore",
                iteration=self.iteration,
                revision=self.exploring_revision,
                prompt_id=prompt_id,
                indices=_indices(start, start + self.unit),
                prune=self.prune,
            )
            for start in range(0, self.pool, self.unit)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    candidates: int
    selections: int
    groups: int
    duplicates: int
    violations: int
    dropped: int = 0
    """Candidates whose previews were pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSummary:
    selections: tuple[Selection, ...]
    """One per prompt, in prompt order."""
    proxy_mean: float
    counts: Counts
    violations: tuple[str, ...] = ()
    """One sentence for each repeated result whose bytes differed; the first result counts."""
    rewards: tuple[tuple[float, ...], ...] = ()
    """Rewards of each group, in prompt order, comparable with those of the selections. If each reward has its own
    statistics: sums of normalised rewards.
    """


def staleness_of(iteration: int, max_staleness: int) -> int:
    """Number of revisions by which exploration in `iteration` is behind the current revision.

    ::

        staleness 0   explore t (revision t) ─► regenerate t ─► update t ─► explore t+1 (revision t+1) …
        staleness 1   explore t (t-1) ─► explore t+1 (t) ─────────────────► explore t+2 (t+1) …
                                        regenerate t ─► update t ─► regenerate t+1 ─► …

    Iteration t explores with exactly revision max(0, t - staleness), even if a newer one exists. So the selection does
    not depend on speed. An explorer loads the next revision only when nothing is left to explore with its current one,
    so repeated units always find workers with their revision.
    """
    return min(iteration, max_staleness)


def plan_iteration(
    config: Config, iteration: int, prompt_ids: Sequence[str], *, score_class: str, policy_digest: str
) -> IterationPlan:
    """The plan of an iteration of a run; see the fields of `IterationPlan`."""
    rollout, sampling, weights = config.rollout, pool_sampling(config), reward_weights(config)
    return IterationPlan(
        iteration=iteration,
        revision=iteration,
        staleness=staleness_of(iteration, rollout.max_staleness),
        prompt_ids=tuple(prompt_ids),
        pool=rollout.pool,
        keep=rollout.keep,
        unit=sampling.unit,
        selection=SelectionRule(kind=rollout.selection, run_seed=config.run.seed, reward_weights=weights),
        one_stage=is_one_stage(config),
        policy_digest=policy_digest,
        score_class=score_class,
        prune=sampling.pruning,
        reproducible=not unreproducible_rewards(config),
    )


@lru_cache(maxsize=1024)
def _indices(start: int, stop: int) -> tuple[int, ...]:
    """Cached, so that units share the tuple: pickle stores a shared object once per message."""
    return tuple(range(start, stop))


def rewards_digest(rewards: Sequence[float]) -> str:
    """SHA-256 of rewards as little-endian float32."""
    return hashlib.sha256(struct.pack(f"<{len(rewards)}f", *rewards)).hexdigest()


def group_digest(group: SampleGroup, *, scores: bool = True) -> str:
    """SHA-256 of the learner's input from a group: rewards, latents, and if present trajectory and shape.

    `scores`: include the rewards; only if they are reproducible.
    """
    values = group.numbers if scores else ()
    digest = hashlib.sha256(struct.pack(f"<{len(values)}f", *values))
    digest.update(np.ascontiguousarray(group.latents).data)
    if group.trajectory is not None:
        digest.update(struct.pack("<q", group.trajectory.first_step))
        digest.update(group.trajectory.states.contiguous().numpy().data)
    if group.shape is not None:
        digest.update(struct.pack("<2q", group.shape.height, group.shape.width))
    return digest.hexdigest()


class IterationState:
    def __init__(self, plan: IterationPlan) -> None:
        self.plan = plan
        self.ledger = Ledger()
        self.selections: dict[str, Selection] = {}
        self.group_rewards: dict[str, tuple[float, ...]] = {}
        """Prompt id → rewards of its accepted group. If each reward has its own statistics: sums of rewards normalised
        by the prompt's pool, so that they are comparable with those of previews.
        """
        self._units: dict[str, list[WorkUnit]] = {prompt_id: [] for prompt_id in plan.prompt_ids}
        """Prompt id → its units so far, in the order of their stages."""
        self._pools = {
            p: PromptSelection(plan.pool, plan.keep, prompt_id=p, rule=plan.selection, iteration=plan.iteration)
            for p in plan.prompt_ids
        }
        self._violations: list[str] = []
        self._plan(*plan.pool_units())

    def record(self, result: UnitResult) -> tuple[Outcome, Selection | None]:
        """Record an explorer's answer; the last unit of a prompt's pool returns the prompt's Selection.

        Raises ValueError for an invalid answer: wrong revision, wrong count, NaN or infinite scores, or pruned
        candidates that contradict the early scores.
        """
        unit, plan = result.unit, self.plan
        if (unit.iteration, unit.revision) != (plan.iteration, plan.exploring_revision):
            raise ValueError(
                f"{result.worker} answered {unit.describe()} of revision {unit.revision}; expected iteration "
                f"{plan.iteration + 1}, revision {plan.exploring_revision}"
            )
        self._refuse_scores(result, unit)
        out = dropped(result)
        scores = rewards_digest(result.numbers) if plan.reproducible else "scores that may differ"
        outcome = self._finish(unit, scores + result.samples_digest, result.worker)
        if outcome is not Outcome.ACCEPTED:
            return outcome, None
        pool = self._pools[unit.prompt_id]
        pool.add(unit.indices, result, out)
        return outcome, self._select(unit.prompt_id) if pool.complete else None

    def record_group(self, group: SampleGroup) -> Outcome:
        """Record the group of a prompt's regenerate unit.

        Raises ValueError if its indices or revision are not those of the selection, or a number is not finite.
        """
        selection = self.selections.get(group.prompt_id)
        if selection is None:
            raise ValueError(f"group of prompt {group.prompt_id} came before its selection")
        unit = self.regenerate_unit(selection)
        if group.indices != unit.indices or group.revision != unit.revision:
            raise ValueError(
                f"group of prompt {group.prompt_id} has indices {group.indices} of revision {group.revision}, "
                f"expected {unit.indices} of revision {unit.revision}"
            )
        self._refuse_scores(group, unit)
        if not np.isfinite(np.asarray(group.latents)).all():
            raise ValueError(f"group of prompt {group.prompt_id} has a latent that is not finite")
        outcome = self._finish(unit, self.digest(group), group.worker)
        if outcome in (Outcome.ACCEPTED, Outcome.RESTORED):
            self.group_rewards[group.prompt_id] = self._pools[group.prompt_id].ranking(group)
        return outcome

    def wanted(self, prompt_id: str) -> tuple[WorkUnit, ...]:
        """Units of a prompt that still need a result.

        In one stage, the regenerate unit stands for building the group from the pool's samples.
        """
        return tuple(unit for unit in self._units[prompt_id] if self.ledger.wants(unit.id))

    def all_wanted(self) -> tuple[WorkUnit, ...]:
        """`wanted` of every prompt, in the plan's order."""
        return tuple(unit for prompt_id in self.plan.prompt_ids for unit in self.wanted(prompt_id))

    def holds(self, group: SampleGroup) -> bool:
        """Whether `group` is the accepted group of its prompt."""
        unit = self.regenerate_unit(self.selections[group.prompt_id])
        same = (group.indices, group.revision) == (unit.indices, unit.revision)
        return same and self.group_digest_of(group.prompt_id) == self.digest(group)

    def digest(self, group: SampleGroup) -> str:
        """The digest by which repeated groups are compared."""
        return group_digest(group, scores=self.plan.reproducible)

    def group_digest_of(self, prompt_id: str) -> str:
        """`digest` of a selected prompt's accepted group; empty if there is none."""
        return self.ledger.digest(self.regenerate_unit(self.selections[prompt_id]).id)

    def has_lost(self, prompt_id: str) -> bool:
        """Whether a prompt's group was accepted, then lost, and must be recreated."""
        selection = self.selections.get(prompt_id)
        return selection is not None and self.ledger.wants_again(self.regenerate_unit(selection).id)

    def lose_group(self, prompt_id: str) -> None:
        """Request an accepted group again, because its data is lost."""
        self.ledger.redo(self.regenerate_unit(self.selections[prompt_id]).id)

    def with_first_scores(self, group: SampleGroup) -> SampleGroup:
        """The group with the scores that chose its samples: samples made again may score differently."""
        if self.plan.reproducible:
            return group
        return replace(group, **self._pools[group.prompt_id].scores(group.indices).columns)

    def regenerate_unit(self, selection: Selection) -> WorkUnit:
        """The unit that samples the chosen seeds of a selection again."""
        return WorkUnit(
            stage="regenerate",
            iteration=self.plan.iteration,
            revision=self.plan.revision,
            prompt_id=selection.prompt_id,
            indices=tuple(c.index for c in selection.chosen),
        )

    # Results

    @property
    def complete(self) -> bool:
        """Whether every prompt has its group."""
        return len(self.selections) == len(self.plan.prompt_ids) and self.ledger.complete

    @property
    def violation(self) -> str:
        """The message on the latest violation."""
        return self._violations[-1]

    @property
    def proxy_mean(self) -> float:
        """Mean ranking reward of all candidates of the iteration, summed in prompt and index order."""
        scores = np.array([self._pools[p].rewards for p in self.plan.prompt_ids], dtype=np.float32)
        return float(np.mean(scores, dtype=np.float64))

    def counts(self) -> Counts:
        pools = self._pools.values()
        return Counts(
            candidates=sum(len(pool.rewards) for pool in pools),
            dropped=sum(len(pool.dropped) for pool in pools),
            selections=len(self.selections),
            groups=len(self.group_rewards),
            duplicates=self.ledger.duplicates,
            violations=self.ledger.violations,
        )

    def close(self) -> IterationSummary:
        """The summary of the iteration. Raises RunError if it is not complete."""
        if not self.complete:
            raise RunError(f"iteration {self.plan.iteration} was closed before it was complete: {self.counts()}")
        return IterationSummary(
            selections=self.ordered_selections(),
            proxy_mean=self.proxy_mean,
            counts=self.counts(),
            violations=tuple(self._violations),
            rewards=tuple(self.group_rewards[p] for p in self.plan.prompt_ids),
        )

    def ordered_selections(self) -> tuple[Selection, ...]:
        """The selections made so far, in the plan's prompt order."""
        return tuple(self.selections[p] for p in self.plan.prompt_ids if p in self.selections)

    # Internals

    def _plan(self, *units: WorkUnit) -> None:
        for unit in units:
            self.ledger.add(unit)
            self._units[unit.prompt_id].append(unit)

    def _select(self, prompt_id: str) -> Selection:
        plan, pool = self.plan, self._pools[prompt_id]
        top, bottom = pool.select()
        selection = Selection(
            iteration=plan.iteration, revision=plan.revision, prompt_id=prompt_id, top=top, bottom=bottom
        )
        self.selections[prompt_id] = selection
        self._plan(self.regenerate_unit(selection))
        return selection

    def _finish(self, unit: WorkUnit, digest: str, worker: str) -> Outcome:
        outcome = self.ledger.finish(unit.id, digest, worker)
        if outcome is Outcome.VIOLATION:
            first = self.ledger.finisher(unit.id)
            self._violations.append(f"{worker} brought other bytes for {unit.describe()} than {first}")
        return outcome

    def _refuse_scores(self, scores: UnitResult | SampleGroup, unit: WorkUnit) -> None:
        """Raise ValueError unless every sample of the unit has all its scores, and all are finite."""
        count, weights = len(unit.indices), self.plan.selection.reward_weights
        sizes = [len(weights)] * count if weights else []
        complete = len(scores.rewards) == count and [len(values) for values in scores.components] == sizes
        if not complete or not all(map(math.isfinite, scores.numbers)):
            rewards = f", each with {len(weights)} rewards" if weights else ""
            raise ValueError(
                f"{scores.worker} answered {unit.describe()} with scores {scores.columns}, which are not the finite "
                f"numbers of {count} samples{rewards}"
            )
