"""The state of one iteration: candidates, selections and finished sample groups. Pure.

Per prompt, in two stages and in one::

    explore units ──record──► all in? ──► Selection ──► a regenerate unit ──record_group──► finished
    sample units ───record──► all in? ──► Selection ──► a group of kept samples ──record_group──► finished

In two stages, some prompts also have an audit unit, of seeds that were not chosen; its rewards are only measured. A
prompt moves on as soon as its own units are in. The result is a function of the accepted results alone: arrival order,
retries and duplicates change nothing. `scheduling.dispatcher` decides which worker does what.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from solrl_ray.errors import RunError
from solrl_ray.records import Pruning, SampleGroup, Selection, UnitResult, WorkUnit
from solrl_ray.rollout.audit import AuditedPool, AuditPlan
from solrl_ray.rollout.pruning import dropped
from solrl_ray.rollout.selection import BEST_AND_WORST, PromptSelection, SelectionRule
from solrl_ray.scheduling.ledger import Ledger, Outcome
from solrl_ray.scheduling.worker_state import kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPlan:
    """The work of one iteration, independent of workers."""

    iteration: int
    revision: int
    """The revision that samples the chosen seeds again."""
    staleness: int = 0
    """Revisions that the explorers are behind it (`scheduling.staleness`)."""
    prompt_ids: tuple[str, ...]
    pool: int
    keep: int
    unit: int
    """Candidates per unit of a pool; divides `pool`."""
    selection: SelectionRule = BEST_AND_WORST
    one_stage: bool = False
    """Whether the pool's own samples are learned from, instead of sampling the chosen seeds again."""
    policy_digest: str = ""
    """LoRA digest of the policy that explores: a journal of the same revision with other bytes is not continued."""
    kinds: tuple[str, ...] = ()
    """Which explorers get each prompt (`config.pools.kinds_of_prompts`); empty for one kind of explorers."""
    score_class: str = ""
    """Of explorers and regenerators: scores of other classes are never mixed with theirs, not even after a resume."""
    audit: AuditPlan | None = None
    fallback_level: int = 0
    """0: previews as configured; higher: as `fidelity.fallback` says."""
    steps: int | None = None
    """Solver steps of the pool's units on that fallback level, if not those of level 0."""
    prune: Pruning | None = None
    """Pruning of each of the pool's units on that fallback level; None if all candidates are sampled to the end."""
    reproducible: bool = True
    """Whether scores are reproducible. If not, the first one counts, and a repeated result is compared by its samples
    alone.
    """

    @property
    def exploring_revision(self) -> int:
        """The revision that samples the pools."""
        return self.revision - self.staleness

    @property
    def audited_prompts(self) -> tuple[str, ...]:
        """The prompts whose pools are audited."""
        return self.audit.prompt_ids(self.iteration, self.prompt_ids) if self.audit else ()

    def pool_units(self) -> list[WorkUnit]:
        """All units of all pools, prompt by prompt, so that the first prompts complete early."""
        return [unit for prompt_id in self.prompt_ids for unit in self.pool_units_of(prompt_id)]

    def pool_units_of(self, prompt_id: str) -> list[WorkUnit]:
        return [
            WorkUnit(
                stage="sample" if self.one_stage else "explore",
                iteration=self.iteration,
                revision=self.exploring_revision,
                prompt_id=prompt_id,
                indices=_indices(start, start + self.unit),
                steps=self.steps,
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
    """A finished iteration."""

    selections: tuple[Selection, ...]
    """In prompt order."""
    proxy_mean: float
    counts: Counts
    audited: tuple[AuditedPool, ...] = ()
    """In prompt order."""
    violations: tuple[str, ...] = ()
    """A sentence for each repeated result with other bytes; the first one counted."""


@lru_cache(maxsize=1024)
def _indices(start: int, stop: int) -> tuple[int, ...]:
    """Cached: pickle stores an object that many units of a message share only once."""
    return tuple(range(start, stop))


def rewards_digest(rewards: Sequence[float]) -> str:
    """SHA-256 of rewards as little-endian float32."""
    return hashlib.sha256(struct.pack(f"<{len(rewards)}f", *rewards)).hexdigest()


def group_digest(group: SampleGroup, *, scores: bool = True) -> str:
    """SHA-256 of a group's rewards, latents and trajectory: the bytes that the learner will see.

    Args:
        scores: include the rewards; only if they are reproducible.
    """
    digest = hashlib.sha256(struct.pack(f"<{len(group.rewards)}f", *group.rewards) if scores else b"")
    digest.update(np.ascontiguousarray(group.latents).data)
    if group.trajectory is not None:
        digest.update(struct.pack("<q", group.trajectory.first_step))
        digest.update(group.trajectory.states.contiguous().numpy().data)
    return digest.hexdigest()


class IterationState:
    def __init__(self, plan: IterationPlan) -> None:
        self.plan = plan
        self._kinds = dict(zip(plan.prompt_ids, plan.kinds, strict=True)) if plan.kinds else {}
        self._pools = {prompt_id: plan.pool_units_of(prompt_id) for prompt_id in plan.prompt_ids}
        """Prompt id → its pool's units."""
        self.explore = Ledger(itertools.chain.from_iterable(self._pools.values()))
        self.regenerate = Ledger()
        self.audit = Ledger()
        self.selections: dict[str, Selection] = {}
        self._audited = plan.audited_prompts
        self._candidates = {
            p: PromptSelection(plan.pool, plan.keep, prompt_id=p, rule=plan.selection, iteration=plan.iteration)
            for p in plan.prompt_ids
        }
        self._group_rewards: dict[str, tuple[float, ...]] = {}
        self._audits: dict[str, UnitResult] = {}
        self._violations: list[str] = []
        self._proxy = {p: np.zeros(plan.pool, dtype=np.float32) for p in plan.prompt_ids}

    def record(self, result: UnitResult) -> tuple[Outcome, Selection | None]:
        """Take an explorer's answer; returns the prompt's Selection once, with its last unit.

        Raises ValueError for an invalid answer (wrong revision, wrong count, NaN or infinite reward, pruned candidates
        that contradict its early scores), or for another kind of explorer than planned.
        """
        self._refuse_nonsense(result, self.plan.exploring_revision)
        kind = self._kinds.get(result.unit.prompt_id, "")
        if self._kinds and kind_of(result.worker) != kind:
            raise ValueError(
                f"{result.worker} answered {result.unit.in_words}, which is for explorers of kind {kind!r}"
            )
        out = set(dropped(result))
        digest = self._scores_digest(result) + result.samples_digest
        outcome = self._finish(self.explore, result.unit, digest, result.worker)
        if outcome is not Outcome.ACCEPTED:
            return outcome, None
        candidates = self._candidates[result.unit.prompt_id]
        for index, reward in zip(result.unit.indices, result.rewards, strict=True):
            if index in out:
                candidates.drop(index)
            else:
                candidates.add(index, reward)
            self._proxy[result.unit.prompt_id][index] = reward
        if not candidates.complete:
            return outcome, None
        return outcome, self._select(result.unit.prompt_id)

    def wanted(self, prompt_id: str) -> tuple[WorkUnit, ...]:
        """Units of a prompt without a result that counts; in one stage, the regenerate unit is to put its group
        together.
        """
        units = [unit for unit in self._pools[prompt_id] if self.explore.wants(unit.id)]
        selection = self.selections.get(prompt_id)
        if selection is not None:
            unit = self.regenerate_unit(selection)
            units += [unit] if self.regenerate.wants(unit.id) else []
            if prompt_id in self._audited and prompt_id not in self._audits:
                units.append(self._audit_unit(selection))
        return tuple(units)

    def all_wanted(self) -> tuple[WorkUnit, ...]:
        """`wanted` of every prompt, in the plan's order."""
        return tuple(unit for prompt_id in self.plan.prompt_ids for unit in self.wanted(prompt_id))

    def holds(self, group: SampleGroup) -> bool:
        """Whether a group is the one that was accepted."""
        unit = self.regenerate_unit(self.selections[group.prompt_id])
        same = (group.indices, group.revision) == (unit.indices, unit.revision)
        return same and self.group_digest_of(group.prompt_id) == self.digest(group)

    def digest(self, group: SampleGroup) -> str:
        """The digest that a repeated group is compared by."""
        return group_digest(group, scores=self.plan.reproducible)

    def group_digest_of(self, prompt_id: str) -> str:
        """`digest` of a prompt's accepted group; empty if there is none."""
        return self.regenerate.digest(self.regenerate_unit(self.selections[prompt_id]).id)

    def has_group(self, prompt_id: str) -> bool:
        """Whether a prompt's group was accepted."""
        return prompt_id in self.selections and bool(self.group_digest_of(prompt_id))

    def has_lost(self, prompt_id: str) -> bool:
        """Whether a prompt's group was accepted and lost, and must be made again."""
        selection = self.selections.get(prompt_id)
        return selection is not None and self.regenerate.wants_again(self.regenerate_unit(selection).id)

    def lose_group(self, prompt_id: str) -> None:
        """Note that an accepted group is gone, and request it again."""
        self.regenerate.redo(self.regenerate_unit(self.selections[prompt_id]).id)

    def record_group(self, group: SampleGroup) -> Outcome:
        """Take the group of a prompt's regenerate unit. Raises ValueError if it is not what the selection asked for."""
        selection = self.selections.get(group.prompt_id)
        if selection is None:
            raise ValueError(f"group of prompt {group.prompt_id} came before its selection")
        unit = self.regenerate_unit(selection)
        if group.indices != unit.indices or group.revision != unit.revision:
            raise ValueError(
                f"group of prompt {group.prompt_id} has indices {group.indices} of revision {group.revision}, "
                f"expected {unit.indices} of revision {unit.revision}"
            )
        if not (all(math.isfinite(r) for r in group.rewards) and bool(np.isfinite(np.asarray(group.latents)).all())):
            raise ValueError(f"group of prompt {group.prompt_id} has a reward or latent that is not finite")
        self.regenerate.add(unit)
        outcome = self._finish(self.regenerate, unit, self.digest(group), group.worker)
        if outcome in (Outcome.ACCEPTED, Outcome.RESTORED):
            self._group_rewards[group.prompt_id] = group.rewards
        return outcome

    def record_audit(self, result: UnitResult) -> Outcome:
        """Take the answer to an audit unit. Raises as `record`."""
        self._refuse_nonsense(result, self.plan.revision)
        outcome = self._finish(self.audit, result.unit, self._scores_digest(result), result.worker)
        if outcome is Outcome.ACCEPTED:
            self._audits[result.unit.prompt_id] = result
        return outcome

    def regenerate_unit(self, selection: Selection) -> WorkUnit:
        """A selection, as a unit."""
        return WorkUnit(
            stage="regenerate",
            iteration=self.plan.iteration,
            revision=self.plan.revision,
            prompt_id=selection.prompt_id,
            indices=tuple(c.index for c in selection.chosen),
        )

    @property
    def audits_done(self) -> tuple[str, ...]:
        """Prompts with an audit result."""
        return tuple(self._audits)

    @property
    def complete(self) -> bool:
        """Whether every prompt has its group, and every audited one its audit."""
        groups = self.explore.complete and self.regenerate.done == len(self.plan.prompt_ids)
        return groups and len(self._audits) == len(self._audited)

    @property
    def proxy_mean(self) -> float:
        """Mean of the rewards that rank all candidates of the iteration (summed in prompt and index order)."""
        return float(np.mean([self._proxy[p] for p in self.plan.prompt_ids], dtype=np.float64))

    def counts(self) -> Counts:
        ledgers = self.explore, self.regenerate, self.audit
        return Counts(
            candidates=self.explore.done * self.plan.unit,
            dropped=sum(len(candidates.dropped) for candidates in self._candidates.values()),
            selections=len(self.selections),
            groups=self.regenerate.done,
            duplicates=sum(ledger.duplicates for ledger in ledgers),
            violations=sum(ledger.violations for ledger in ledgers),
        )

    def close(self) -> IterationSummary:
        """The summary of the iteration. Raises RunError if it is not complete."""
        if not self.complete:
            raise RunError(f"iteration {self.plan.iteration} was closed before it was complete: {self.counts()}")
        return IterationSummary(
            selections=self.ordered_selections(),
            proxy_mean=self.proxy_mean,
            counts=self.counts(),
            audited=tuple(self._audited_pool(prompt_id) for prompt_id in self._audited),
            violations=tuple(self._violations),
        )

    def ordered_selections(self) -> tuple[Selection, ...]:
        """The selections made so far, in the plan's prompt order."""
        return tuple(self.selections[p] for p in self.plan.prompt_ids if p in self.selections)

    def _select(self, prompt_id: str) -> Selection:
        best, worst = self._candidates[prompt_id].select()
        selection = Selection(
            iteration=self.plan.iteration, revision=self.plan.revision, prompt_id=prompt_id, best=best, worst=worst
        )
        self.selections[prompt_id] = selection
        if not self.plan.one_stage:
            self.regenerate.add(self.regenerate_unit(selection))
        if prompt_id in self._audited:
            self.audit.add(self._audit_unit(selection))
        return selection

    @property
    def violation(self) -> str:
        """The sentence on the last violation."""
        return self._violations[-1]

    def with_first_scores(self, group: SampleGroup) -> SampleGroup:
        """A group of kept samples with the scores that chose them: samples that were made again may have others."""
        if self.plan.reproducible:
            return group
        return replace(group, rewards=tuple(float(c.reward) for c in self.selections[group.prompt_id].chosen))

    def _scores_digest(self, result: UnitResult) -> str:
        if not self.plan.reproducible:
            return "scores that may differ"
        return rewards_digest((*result.rewards, *result.early))

    def _finish(self, ledger: Ledger, unit: WorkUnit, digest: str, worker: str) -> Outcome:
        outcome = ledger.finish(unit.id, digest, worker)
        if outcome is Outcome.VIOLATION:
            first = ledger.finisher(unit.id)
            self._violations.append(f"{worker} brought other bytes for {unit.in_words} than {first}")
        return outcome

    def _audit_unit(self, selection: Selection) -> WorkUnit:
        """Seeds of a pool that were not selected, as a unit."""
        assert self.plan.audit is not None
        plan, chosen = self.plan, self.regenerate_unit(selection)
        out = self._candidates[selection.prompt_id].dropped
        indices = self.plan.audit.indices(plan.iteration, selection.prompt_id, plan.pool, chosen.indices, out)
        return replace(chosen, stage="audit", indices=indices)

    def _audited_pool(self, prompt_id: str) -> AuditedPool:
        result = self._audits[prompt_id]
        return AuditedPool(
            proxies=tuple(self._proxy[prompt_id].tolist()),
            chosen=self.regenerate_unit(self.selections[prompt_id]).indices,
            chosen_rewards=self._group_rewards[prompt_id],
            audited=result.unit.indices,
            audited_rewards=result.rewards,
            dropped=self._candidates[prompt_id].dropped,
        )

    def _refuse_nonsense(self, result: UnitResult, revision: int) -> None:
        unit = result.unit
        if (unit.iteration, unit.revision) != (self.plan.iteration, revision):
            raise ValueError(
                f"{result.worker} answered {unit.in_words} of revision {unit.revision}; expected iteration "
                f"{self.plan.iteration + 1}, revision {revision}"
            )
        scores = (*result.rewards, *result.early)
        if len(result.rewards) != len(unit.indices) or not all(math.isfinite(score) for score in scores):
            raise ValueError(f"{result.worker} answered {unit.in_words} with rewards {scores}")
