"""The selector: ledger, selection and journal of the present iteration. One truth, one failure domain.

What it acknowledges is in the journal, on the disk. Bringing the same result twice changes nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from solrl_ray.errors import RunError
from solrl_ray.records import SampleGroup, Selection, UnitResult, WorkUnit
from solrl_ray.run_folder import RunFolder
from solrl_ray.scheduling.book import Closed, IterationBook, IterationPlan, group_digest
from solrl_ray.scheduling.ledger import Ledger, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An iteration's start. On resume, what the journal already holds."""

    groups: tuple[SampleGroup, ...]
    """Regenerated groups that need not be made again."""
    candidates: int
    """Candidates whose proxy rewards are known already."""
    message: str = ""
    """What a user should know: that the journal was set aside, and why."""


class Selector:
    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)
        self._book: IterationBook | None = None
        self._journal = self._folder.journal(0)

    def __repr__(self) -> str:
        """What Ray shows in its dashboard and before each line that this process logs."""
        return f"selector of {self._folder.path.name}"

    def open(self, plan: IterationPlan) -> Opened:
        """Begin an iteration, or go on with it where its journal ends.

        A journal that was made with another policy under the same revision number is set aside, and the iteration is
        done anew.

        Raises:
            RunError: the journal was begun with another plan.
        """
        self._journal.close()
        self._journal = self._folder.journal(plan.iteration)
        self._book = IterationBook(plan)
        entries = self._journal.entries()
        header = {"kind": "open", "plan": _plan_entry(plan)}
        message = ""
        if entries and entries[0] != header:
            if not _differs_in_policy_only(entries[0], header):
                raise RunError(f"{self._journal.path} was begun with another plan: {entries[0]}, now {header}")
            stale = self._journal.set_aside()
            message = f"iteration {plan.iteration} is done anew: {stale.name} was made by another revision's bytes"
            entries = []
        if not entries:
            self._journal.append(header)
        groups = [group for entry in entries[1:] if (group := self._replay(entry)) is not None]
        return Opened(groups=tuple(groups), candidates=self._book.counts().candidates, message=message)

    def lease(self, stage: str, slots: list[str]) -> list[tuple[str, WorkUnit]]:
        """Units for workers with a free slot, one per entry of `slots`, as far as units are waiting."""
        ledger = self._ledger(stage)
        leased = ((worker, ledger.lease(worker)) for worker in slots)
        return [(worker, unit) for worker, unit in leased if unit is not None]

    def release(self, worker: str) -> tuple[str, ...]:
        """Take back a lost worker's units."""
        return self._ledger("preview").release(worker) + self._ledger("full").release(worker)

    def requeue(self, unit: WorkUnit) -> None:
        """Have a unit done again whose answer was lost on its way here."""
        self._ledger(unit.stage).requeue(unit.id)

    def fold(self, result: UnitResult) -> Selection | None:
        """Take a preview result. Returns the prompt's selection if this was its last unit.

        Raises:
            RunError: the answer is nonsense, or a duplicate has other bytes than the accepted result.
        """
        book = self._iteration
        try:
            outcome, selection = book.fold_preview(result)
        except (KeyError, ValueError) as error:
            raise RunError(f"refused a result of {result.worker}: {error}") from error
        if outcome is Outcome.VIOLATION:
            raise RunError(f"{result.worker} computed other rewards for {result.unit.id} than the first result")
        if outcome is Outcome.ACCEPTED:
            self._journal.append(_preview_entry(result), *([_selection_entry(selection)] if selection else []))
        return selection

    def store(self, group: SampleGroup) -> Outcome:
        """Take a regenerated group: write it to the run folder, then acknowledge it. Raises as `fold` does."""
        try:
            outcome = self._iteration.fold_full(group)
        except (KeyError, ValueError) as error:
            raise RunError(f"refused a group of {group.worker}: {error}") from error
        if outcome is Outcome.VIOLATION:
            raise RunError(f"{group.worker} regenerated other bytes for prompt {group.prompt_id} than the first")
        if outcome is Outcome.ACCEPTED:
            self._folder.save_group(group)
            self._journal.append({"kind": "full", "prompt": group.prompt_id, "digest": group_digest(group)})
        return outcome

    def close(self) -> Closed:
        """End the iteration. Raises RunError if it is not complete."""
        return self._iteration.close()

    @property
    def _iteration(self) -> IterationBook:
        if self._book is None:
            raise RunError("the selector was used before an iteration was opened")
        return self._book

    def _ledger(self, stage: str) -> Ledger:
        return self._iteration.preview if stage == "preview" else self._iteration.full

    def _replay(self, entry: dict[str, Any]) -> SampleGroup | None:
        """Fold one journal entry; returns the group that a ``full`` entry speaks of if its file still holds."""
        book = self._iteration
        if entry["kind"] == "preview":
            book.fold_preview(_preview_result(entry, book.plan))
        elif entry["kind"] == "full":
            try:
                group = self._folder.load_group(book.plan.iteration, entry["prompt"])
            except (OSError, SafetensorError):
                return None  # not there or cut off: it is regenerated, to the same bytes
            if group_digest(group) == entry["digest"]:
                book.fold_full(group)
                return group
        return None


def _plan_entry(plan: IterationPlan) -> dict[str, Any]:
    return {
        "iteration": plan.iteration,
        "revision": plan.revision,
        "prompts": list(plan.prompt_ids),
        "pool": plan.pool,
        "keep": plan.keep,
        "micro_batch": plan.micro_batch,
        "policy_digest": plan.policy_digest,
    }


def _differs_in_policy_only(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two headers are equal but for the digest of the sampling policy."""
    plans = [{**header, "plan": {**header.get("plan", {}), "policy_digest": ""}} for header in (one, other)]
    return plans[0] == plans[1]


def _preview_entry(result: UnitResult) -> dict[str, Any]:
    return {
        "kind": "preview",
        "prompt": result.unit.prompt_id,
        "indices": list(result.unit.indices),
        "rewards": struct.pack(f"<{len(result.rewards)}f", *result.rewards).hex(),
        "worker": result.worker,
        "score_class": result.score_class,
        "seconds": result.seconds,
    }


def _preview_result(entry: dict[str, Any], plan: IterationPlan) -> UnitResult:
    raw = bytes.fromhex(entry["rewards"])
    return UnitResult(
        unit=WorkUnit(
            stage="preview",
            iteration=plan.iteration,
            revision=plan.revision,
            prompt_id=entry["prompt"],
            indices=tuple(entry["indices"]),
        ),
        rewards=struct.unpack(f"<{len(raw) // 4}f", raw),
        worker=entry["worker"],
        score_class=entry["score_class"],
        seconds=entry["seconds"],
    )


def _selection_entry(selection: Selection) -> dict[str, Any]:
    return {
        "kind": "selection",
        "prompt": selection.prompt_id,
        "best": [c.index for c in selection.best],
        "worst": [c.index for c in selection.worst],
    }
