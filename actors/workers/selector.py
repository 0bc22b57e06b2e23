"""The selector: results, selection and journals of the open iterations, in one actor.

::

    open ─► accept, accept_groups, assemble … ─► close ─► drop
     ▲ the journal is replayed: an iteration goes on where it ends

A result that it acknowledges is in the journal, on the disk. Groups are written in the background, and `close` waits
for them. A repeated call changes nothing. Results of one call are synced to the disk once
(docs/decisions/controller.md). Acknowledgements name the next units; the dispatcher chooses their workers
(`scheduling.dispatcher`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.cluster.rpc import Callee
from solrl_ray.errors import NonsenseError, RunError
from solrl_ray.records import SampleGroup, UnitResult, WorkUnit
from solrl_ray.rollout.groups import assemble
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationState, IterationSummary
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.storage.journal import Journal
from solrl_ray.storage.journal_entries import (
    maker,
    plan_entry,
    same_work,
    selection_entry,
    split,
    unit_entry,
    unit_result,
)
from solrl_ray.storage.run_folder import RunFolder, Unreadable

WRITERS = 8
"""Groups that are written to the disk at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The outcome of one of the results of a call. The same result sent again has the same outcome."""

    chosen: WorkUnit | None = None
    """Once its prompt's pool is complete: the seeds to sample again, unless their group has arrived."""
    differs: str = ""
    """If it came again with other bytes than the first result, which counts: who brought what, as a sentence."""
    repeats: bool = False
    """For a group: one was accepted before, which counts. It may have other bytes or, where scores are not
    reproducible, other rewards.
    """
    refused: str = ""
    """Why it was refused, if it is no answer."""


_COUNTED = Ack()
"""The most frequent answer; pickle stores the same object only once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An iteration's state when it is opened. On resume, what the journal holds."""

    groups: tuple[SampleGroup, ...]
    """Finished groups."""
    units: tuple[WorkUnit, ...]
    """All units that workers should do now."""
    results: tuple[UnitResult, ...] = ()
    """Those of the journal, which a new selector must get again: a disk may damage it later."""
    message: str = ""
    """For the user: that the journal was set aside, and why."""


@dataclass(slots=True)
class _Open:
    state: IterationState
    journal: Journal
    later: list[dict[str, Any]]
    """For an iteration explored ahead: the entries after the journal's last ``revision``, made with that revision."""
    save: Callable[[SampleGroup], Future[None]]
    """Starts writing a group."""
    taken: list[tuple[SampleGroup, dict[str, Any] | None]] = field(default_factory=list)
    """Groups to be written, with their lines for the journal, if any."""
    writing: deque[tuple[Future[None], dict[str, Any] | None]] = field(default_factory=deque)
    """Groups being written, likewise."""
    revised: bool = False
    """For an iteration explored ahead: whether the policy that regenerates it is known."""

    def wanted(self) -> tuple[WorkUnit, ...]:
        """All units that workers should do now. Nothing is regenerated before the policy for it is known."""
        units = self.state.all_wanted()
        if self.state.plan.staleness and not self.revised:
            units = tuple(unit for unit in units if unit.stage == "explore")
        return units

    def write(self) -> None:
        """Start writing the accepted groups."""
        for group, entry in self.taken:
            self.writing.append((self.save(group), entry))
        self.taken.clear()

    def settle(self, *, wait: bool) -> None:
        """Journal the written groups; with `wait`, also those still being written."""
        if wait:
            self.write()
        while self.writing and (wait or self.writing[0][0].done()):
            written, entry = self.writing.popleft()
            written.result()
            if entry is not None:
                self.journal.append(entry)


class Selector(Callee):
    def __init__(self, folder: Path, strict: bool = False) -> None:
        """`strict`: a repeated result with other bytes ends the run."""
        self._folder = RunFolder(folder)
        self._strict = strict
        self._open: dict[int, _Open] = {}
        """By iteration; two where exploring runs ahead of learning."""
        self._writers = ThreadPoolExecutor(WRITERS, "writer")

    def _title(self) -> str:
        return f"selector of {self._folder.path.name}"

    def open(self, plan: IterationPlan) -> Opened:
        """Begin an iteration, or continue it where its journal ends.

        A journal made with another policy under the same revision number, or by workers of other score classes, is set
        aside, and the iteration is done again. For an iteration explored ahead, `revise` brings back what was
        regenerated.

        Raises RunError: the journal was begun with another plan.
        """
        self.drop(plan.iteration)
        journal = self._folder.journal(plan.iteration)
        state = IterationState(plan)
        self._folder.sync_folders()
        damaged, entries = journal.damaged(), journal.recover()  # drops damaged entries
        header = {"kind": "open", "plan": plan_entry(plan)}
        message = ""
        if damaged:
            message = (
                f"line {damaged[0]} of {journal.path.name} is damaged; it and the {damaged[1]} after it are left out, "
                f"and what iteration {plan.iteration} then lacks is computed again"
            )
        if entries and entries[0] != header:
            if not same_work(entries[0], header):
                raise RunError(f"{journal.path} was begun with another plan: {entries[0]}, now {header}")
            stale = journal.set_aside()
            message = f"iteration {plan.iteration} is done again: {stale.name} was made by {maker(entries[0], header)}"
            entries = []
        if not entries:
            journal.append(header)
        now, later = (entries[1:], []) if not plan.staleness else split(entries[1:])
        results, groups = self._replay_all(state, now)
        opened = self._open[plan.iteration] = _Open(state, journal, later, save=self._save)
        return Opened(groups=groups, units=opened.wanted(), results=results, message=message)

    def revise(self, iteration: int, policy_digest: str) -> Opened:
        """Set the policy that regenerates an iteration which was explored ahead.

        `policy_digest`: its LoRA digest. The journal's entries of other policies are ignored.
        """
        opened = self._of(iteration)
        entry = {"kind": "revision", "policy_digest": policy_digest}
        if opened.later[:1] != [entry]:
            opened.journal.append(entry)
            opened.later = [entry]
        opened.revised, state = True, opened.state
        _, groups = self._replay_all(state, opened.later[1:])
        return Opened(groups=groups, units=opened.wanted())

    def drop(self, iteration: int) -> None:
        """Forget an iteration that a checkpoint contains."""
        dropped = self._open.pop(iteration, None)
        if dropped is not None:
            dropped.settle(wait=True)
            dropped.journal.close()

    def accept(self, results: Sequence[UnitResult]) -> list[Ack]:
        """Take results of pools' units; invalid ones are refused one by one.

        Raises RunError: a duplicate differs from the accepted result, and the run is strict or the accepted data is
        lost. Earlier results of the call are accepted then.
        """
        with self._together():
            return [self._acknowledged(result) for result in results]

    def accept_groups(self, *groups: SampleGroup) -> list[Ack]:
        """Take groups, given by reference. As `accept`; they are on the disk after `close`."""
        with self._together():
            return [self._acknowledged(group) for group in groups]

    def accept_again(self, *accepted: UnitResult | SampleGroup) -> None:
        """After a restart: take results and groups accepted before; those in the journal change nothing."""
        with self._together():
            for each in accepted:
                if self._lacks(each):
                    self._acknowledged(each)

    def _lacks(self, accepted: UnitResult | SampleGroup) -> bool:
        if isinstance(accepted, SampleGroup):
            return accepted.prompt_id not in self._of(accepted.iteration).state.group_rewards
        return self._of(accepted.unit.iteration).state.ledger.wants(accepted.unit.id)

    def wanted(self, iteration: int) -> tuple[WorkUnit, ...]:
        """All units of an iteration that workers should do now."""
        return self._of(iteration).wanted()

    def _acknowledged(self, brought: UnitResult | SampleGroup) -> Ack:
        try:
            if not isinstance(brought, SampleGroup):
                return self.record(brought)
            if self.record_group(brought) in (Outcome.DUPLICATE, Outcome.VIOLATION):
                return Ack(repeats=True)
        except NonsenseError as error:
            return Ack(refused=str(error))
        return _COUNTED

    def record(self, result: UnitResult) -> Ack:
        """Take a result. Raises NonsenseError if it is invalid, RunError as `accept`."""
        opened = self._open_for(result.worker, result.unit.iteration)
        state, prompt_id = opened.state, result.unit.prompt_id
        try:
            outcome, selection = state.record(result)
        except (KeyError, ValueError) as error:
            raise NonsenseError(f"refused a result of {result.worker}: {error}") from error
        self._stop_if_differs(state, outcome)
        if outcome is Outcome.ACCEPTED:
            opened.journal.append(unit_entry(result), *([selection_entry(selection)] if selection else []))
        wanted = state.wanted(prompt_id) if prompt_id in state.selections else ()
        chosen = next((unit for unit in wanted if unit.stage == "regenerate"), None)
        differs = state.violation if outcome is Outcome.VIOLATION else ""
        return Ack(chosen=chosen, differs=differs) if chosen or differs else _COUNTED

    def record_group(self, group: SampleGroup) -> Outcome:
        """Take a group, which is written in the background. Raises as `record`."""
        opened = self._open_for(group.worker, group.iteration)
        lost = opened.state.has_lost(group.prompt_id)
        try:
            outcome = opened.state.record_group(group)
        except (KeyError, ValueError) as error:
            raise NonsenseError(f"refused a group of {group.worker}: {error}") from error
        self._stop_if_differs(opened.state, outcome, lost=lost)
        if outcome in (Outcome.ACCEPTED, Outcome.RESTORED):
            digest = opened.state.group_digest_of(group.prompt_id)
            entry = {"kind": "regenerate", "prompt": group.prompt_id, "digest": digest}
            opened.taken.append((group, entry if outcome is Outcome.ACCEPTED else None))
        return outcome

    def assemble(self, unit: WorkUnit, *parts: SampleGroup) -> tuple[tuple[float, ...], SampleGroup]:
        """Make a prompt's group of the kept samples, and take it; returns rewards and group.

        Raises RunError as `accept`.
        """
        try:
            group = self._of(unit.iteration).state.with_first_scores(assemble(unit, parts))
            with self._together():
                self.record_group(group)
        except (ValueError, NonsenseError) as error:  # their units were accepted and are not repeated
            raise RunError(f"refused the samples of prompt {unit.prompt_id}: {error}") from error
        return group.rewards, group

    def stored(self, iteration: int, prompt_id: str) -> tuple[tuple[float, ...], SampleGroup | None]:
        """Rewards of an acknowledged group, and the group, read from the run folder.

        If the folder no longer holds its bytes, neither: from now on `wanted` has the units that make it again.
        """
        opened = self._of(iteration)
        opened.settle(wait=True)
        try:
            group = self._folder.load_group(iteration, prompt_id)
            if opened.state.holds(group):
                return group.rewards, group
        except Unreadable:
            pass
        opened.state.lose_group(prompt_id)
        return (), None

    def close(self, iteration: int) -> IterationSummary | tuple[WorkUnit, ...]:
        """The summary of an iteration, once all of it is on the disk; or the missing units, if it is not complete:
        groups that a lost selector had not written may be lost with their node.
        """
        opened = self._of(iteration)
        with opened.journal.together():
            opened.settle(wait=True)
        return opened.wanted() or opened.state.close()

    def _save(self, group: SampleGroup) -> Future[None]:
        return self._writers.submit(self._folder.save_group, group)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Sync the journal once, at the end of the block; then start writing groups.

        Not before: the writers and the next group's check would wait for each other.
        """
        with ExitStack() as stack:
            for opened in self._open.values():
                stack.callback(opened.write)
                stack.enter_context(opened.journal.together())
                opened.settle(wait=False)
            yield

    def _of(self, iteration: int) -> _Open:
        if iteration not in self._open:
            raise RunError(f"the selector was asked about iteration {iteration}, but {sorted(self._open)} are open")
        return self._open[iteration]

    def _open_for(self, worker: str, iteration: int) -> _Open:
        if iteration not in self._open:
            raise NonsenseError(f"{worker} answered a unit of iteration {iteration + 1}, which is not open")
        return self._open[iteration]

    def _stop_if_differs(self, state: IterationState, outcome: Outcome, *, lost: bool = False) -> None:
        """Raises RunError for a violation that ends the run.

        `lost`: the first result's data is gone, so this one was to replace it.
        """
        if outcome is Outcome.VIOLATION and (self._strict or lost):
            why = "whose samples are lost" if lost else "and fleet.strict is true"
            raise RunError(f"{state.violation}, {why}")

    def _replay_all(
        self, state: IterationState, entries: list[dict[str, Any]]
    ) -> tuple[tuple[UnitResult, ...], tuple[SampleGroup, ...]]:
        """Record journal entries; returns the results, and the finished groups."""
        results, groups = [], []
        for entry in entries:
            if entry["kind"] in ("explore", "sample"):
                results.append(unit_result(entry, state.plan))
                state.record(results[-1])
            elif group := self._replay_group(state, entry):
                groups.append(group)
        return tuple(results), tuple(groups)

    def _replay_group(self, state: IterationState, entry: dict[str, Any]) -> SampleGroup | None:
        """Record the group of a ``regenerate`` entry and return it, if its file is intact."""
        if entry["kind"] != "regenerate" or entry["prompt"] in state.group_rewards:  # made again, it has two entries
            return None
        try:
            group = self._folder.load_group(state.plan.iteration, entry["prompt"])
            if state.digest(group) == entry["digest"]:
                state.record_group(group)
                return group
        except (Unreadable, ValueError):
            pass  # it is made again, to the same bytes
        return None
