"""The selector: the actor that records results, selects seeds and writes the journals of the open iterations.

::

    open ─► accept, accept_groups, assemble … ─► close ─► drop
     ▲ replays the journal: an iteration continues where its journal ends

An acknowledged result is in the journal, on disk. Results of one call are synced to disk together
(docs/decisions/controller.md). Groups are written in the background, and `close` waits for them. Repeating a call
changes nothing. Acknowledgements name the next units; the dispatcher chooses their workers (`scheduling.dispatcher`).
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
"""Number of groups that are written to disk at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The selector's acknowledgement of one result. Sending the same result again gives the same acknowledgement."""

    chosen: WorkUnit | None = None
    """The seeds to sample again: set once the prompt's pool is complete, unless their group has arrived."""
    differs: str = ""
    """Set if this result repeats an earlier one with other bytes: a sentence that names both workers. The first counts.
    """
    repeats: bool = False
    """For a group: True if one was accepted before. The first counts; this one may have other bytes or, if scores are
    not reproducible, other rewards.
    """
    refused: str = ""
    """Why the result was refused; empty if it was accepted."""


_COUNTED = Ack()
"""The most frequent acknowledgement, one object for all: pickle stores an object only once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """State of an iteration when it is opened: empty, or, after a resume, as its journal has it."""

    groups: tuple[SampleGroup, ...]
    """Finished groups."""
    units: tuple[WorkUnit, ...]
    """All units that workers should compute now."""
    results: tuple[UnitResult, ...] = ()
    """Results in the journal. A new selector must get them again, because the disk may damage the journal later."""
    message: str = ""
    """Message for the user: why the journal was set aside, or which part of it is damaged; empty otherwise."""


@dataclass(slots=True)
class _Open:
    state: IterationState
    journal: Journal
    later: list[dict[str, Any]]
    """For an iteration explored ahead: the journal's last ``revision`` entry and those after it, made with this
    revision.
    """
    save: Callable[[SampleGroup], Future[None]]
    """Starts writing a group to disk."""
    taken: list[tuple[SampleGroup, dict[str, Any] | None]] = field(default_factory=list)
    """Groups to be written, each with its line for the journal, if any."""
    writing: deque[tuple[Future[None], dict[str, Any] | None]] = field(default_factory=deque)
    """Groups being written, each with its line for the journal, if any."""
    revised: bool = False
    """For an iteration explored ahead: True once the policy for regenerating it is known."""

    def wanted(self) -> tuple[WorkUnit, ...]:
        """All units that workers should compute now. Regenerating starts only when the policy for it is known."""
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
        """Write journal entries for groups that are on disk; if `wait`, first wait for those still being written."""
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
        """Iteration → its state; two iterations if exploring runs ahead of learning."""
        self._writers = ThreadPoolExecutor(WRITERS, "writer")

    def _title(self) -> str:
        return f"selector of {self._folder.path.name}"

    def open(self, plan: IterationPlan) -> Opened:
        """Begin an iteration, or continue it where its journal ends.

        If the journal was made with another policy under the same revision number, or by workers of other score
        classes, it is set aside and the iteration starts again. For an iteration explored ahead, `revise` restores the
        regenerated groups.

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
                f"line {damaged[0]} of {journal.path.name} is damaged; it and the {damaged[1]} after it are "
                f"left out, and the results that iteration {plan.iteration} lacks are computed again"
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
        """Set the policy for regenerating an iteration that was explored ahead.

        `policy_digest`: LoRA digest of this policy. Groups in the journal that another policy made are ignored.
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
        """Forget an iteration whose results a checkpoint contains."""
        dropped = self._open.pop(iteration, None)
        if dropped is not None:
            dropped.settle(wait=True)
            dropped.journal.close()

    def accept(self, results: Sequence[UnitResult]) -> list[Ack]:
        """Record results of explore or sample units. An invalid result is refused and does not affect the others.

        Raises RunError: a duplicate differs from the accepted result, and the run is strict or the accepted data is
        lost. Results before it in the same call are accepted.
        """
        with self._together():
            return [self._ack_for(result) for result in results]

    def accept_groups(self, *groups: SampleGroup) -> list[Ack]:
        """`accept` for groups, passed by reference. They are on disk after `close`."""
        with self._together():
            return [self._ack_for(group) for group in groups]

    def accept_again(self, *accepted: UnitResult | SampleGroup) -> None:
        """After a restart: record results and groups that were accepted before. Those in the journal change nothing."""
        with self._together():
            for each in accepted:
                if self._lacks(each):
                    self._ack_for(each)

    def _lacks(self, accepted: UnitResult | SampleGroup) -> bool:
        if isinstance(accepted, SampleGroup):
            return accepted.prompt_id not in self._of(accepted.iteration).state.group_rewards
        return self._of(accepted.unit.iteration).state.ledger.wants(accepted.unit.id)

    def wanted(self, iteration: int) -> tuple[WorkUnit, ...]:
        """All units of an iteration that workers should compute now."""
        return self._of(iteration).wanted()

    def _ack_for(self, brought: UnitResult | SampleGroup) -> Ack:
        try:
            if not isinstance(brought, SampleGroup):
                return self.record(brought)
            if self.record_group(brought) in (Outcome.DUPLICATE, Outcome.VIOLATION):
                return Ack(repeats=True)
        except NonsenseError as error:
            return Ack(refused=str(error))
        return _COUNTED

    def record(self, result: UnitResult) -> Ack:
        """Record a result. Raises NonsenseError if it is invalid, RunError as `accept`."""
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
        """Record a group and write it to disk in the background. Raises as `record`."""
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
        """Assemble a prompt's group from the kept samples and record it; returns its rewards and the group.

        `unit`: the chosen seeds. `parts`: samples of the pool's units that contain them.

        Raises RunError as `accept`, or if the samples do not fit the unit.
        """
        try:
            group = self._of(unit.iteration).state.with_first_scores(assemble(unit, parts))
            with self._together():
                self.record_group(group)
        except (ValueError, NonsenseError) as error:  # a RunError: their units were accepted, so none is repeated
            raise RunError(f"refused the samples of prompt {unit.prompt_id}: {error}") from error
        return group.rewards, group

    def stored(self, iteration: int, prompt_id: str) -> tuple[tuple[float, ...], SampleGroup | None]:
        """Rewards of an acknowledged group, and the group, read from the run folder.

        If the file is missing or damaged: empty and None, and from now on `wanted` has the unit that makes it again.
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
        """Wait until all of an iteration is on disk; returns its summary.

        If groups are missing, returns the units that make them again: groups that a previous selector had not written
        may be lost with their node.
        """
        opened = self._of(iteration)
        with opened.journal.together():
            opened.settle(wait=True)
        return opened.wanted() or opened.state.close()

    def _save(self, group: SampleGroup) -> Future[None]:
        return self._writers.submit(self._folder.save_group, group)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Context that syncs the journals once, at its end, and then starts writing groups.

        Writing starts only then: writers and the check of the next group would slow each other down.
        """
        with ExitStack() as stack:
            for opened in self._open.values():
                stack.callback(opened.write)
                stack.enter_context(opened.journal.together())
                opened.settle(wait=False)
            yield

    def _of(self, iteration: int) -> _Open:
        if iteration not in self._open:
            raise RunError(f"iteration {iteration} is not open in the selector; open iterations: {sorted(self._open)}")
        return self._open[iteration]

    def _open_for(self, worker: str, iteration: int) -> _Open:
        if iteration not in self._open:
            raise NonsenseError(f"{worker} answered a unit of iteration {iteration + 1}, which is not open")
        return self._open[iteration]

    def _stop_if_differs(self, state: IterationState, outcome: Outcome, *, lost: bool = False) -> None:
        """Raises RunError for a violation that ends the run.

        `lost`: True if the data of the first result is lost, so that this one should have replaced it.
        """
        if outcome is Outcome.VIOLATION and (self._strict or lost):
            why = "whose samples are lost" if lost else "and fleet.strict is true"
            raise RunError(f"{state.violation}, {why}")

    def _replay_all(
        self, state: IterationState, entries: list[dict[str, Any]]
    ) -> tuple[tuple[UnitResult, ...], tuple[SampleGroup, ...]]:
        """Record journal entries; returns the results and the finished groups."""
        results, groups = [], []
        for entry in entries:
            if entry["kind"] in ("explore", "sample"):
                results.append(unit_result(entry, state.plan))
                state.record(results[-1])
            elif group := self._replay_group(state, entry):
                groups.append(group)
        return tuple(results), tuple(groups)

    def _replay_group(self, state: IterationState, entry: dict[str, Any]) -> SampleGroup | None:
        """Record the group of a ``regenerate`` entry and return it; None if its file is damaged."""
        # A group that was made again has two entries.
        if entry["kind"] != "regenerate" or entry["prompt"] in state.group_rewards:
            return None
        try:
            group = self._folder.load_group(state.plan.iteration, entry["prompt"])
            if state.digest(group) == entry["digest"]:
                state.record_group(group)
                return group
        except (Unreadable, ValueError):
            pass  # it is made again, with the same bytes
        return None
