"""Versions of the code that break a promise about the disk, a resume, who is told, budgets or results.

Each replaces one method, as those of `test_broken_versions`. Most change no digest: invariants of `promises` see them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.dispatch.selector_client import SelectorClient
from actors.fleet.pool import Pool
from actors.fleet.worker import Worker
from actors.overlap import Overlap
from actors.training.checkpoints import CheckpointWriter
from actors.training.learner_group import LearnerGroup
from actors.workers.selector import Selector
from actors.world import Process
from solrl_ray.common import files
from solrl_ray.errors import RunError, UserError
from solrl_ray.learning import state
from solrl_ray.learning.state import LearnerState
from solrl_ray.scheduling.iteration_state import IterationPlan
from solrl_ray.scheduling.worker_state import Replacements, State
from solrl_ray.storage import run_folder

Break = Callable[[pytest.MonkeyPatch], None]


# The disk


def renames_a_checkpoint_without_syncing_its_folder(patch: pytest.MonkeyPatch) -> None:
    def replaced(folder: Path, contents: Mapping[str, bytes]) -> None:
        sync = files.sync_folder
        with pytest.MonkeyPatch.context() as unsynced:
            unsynced.setattr(files, "sync_folder", lambda each: None if each == folder.parent else sync(each))
            files.replace_folder(folder, contents)

    patch.setattr(state, "replace_folder", replaced)


def replaces_a_file_without_syncing_its_folder(patch: pytest.MonkeyPatch) -> None:
    def replaced(path: Path, content: bytes) -> None:
        with pytest.MonkeyPatch.context() as unsynced:
            unsynced.setattr(files, "sync_folder", lambda each: None)
            files.replace_file(path, content)

    patch.setattr(run_folder, "replace_file", replaced)


def says_that_a_checkpoint_is_saved_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    save = CheckpointWriter.save

    async def saved(self: CheckpointWriter, state: LearnerState, updates: int) -> float:
        self._learners.saved()
        return await save(self, state, updates)

    patch.setattr(CheckpointWriter, "save", saved)


def does_not_wait_for_the_checkpoint_before(patch: pytest.MonkeyPatch) -> None:
    save, saved, newest = Overlap.save, Overlap.saved, dict[int, int]()

    def begun(self: Overlap, state: LearnerState, updates: int) -> None:
        newest[id(self)] = updates
        save(self, state, updates)

    async def waited(self: Overlap) -> float | None:
        if newest.get(id(self)) == self._last:  # the run ends
            return await saved(self)
        return None

    patch.setattr(Overlap, "save", begun)
    patch.setattr(Overlap, "saved", waited)


def ends_at_a_checkpoint_that_the_disk_does_not_give(patch: pytest.MonkeyPatch) -> None:
    load = LearnerState.load

    def loaded(folder: Path) -> LearnerState:
        try:
            return load(folder)
        except UserError as error:
            raise RunError(str(error)) from error

    patch.setattr(LearnerState, "load", loaded)


# A resume


def _resumes_with(patch: pytest.MonkeyPatch, changed: Callable[[LearnerState], LearnerState]) -> None:
    load = LearnerState.load
    patch.setattr(LearnerState, "load", lambda folder: changed(load(folder)))


def restores_the_optimisers_steps_from_updates(patch: pytest.MonkeyPatch) -> None:
    _resumes_with(patch, lambda state: replace(state, steps=state.updates))


def restores_the_average_from_the_trained_policy(patch: pytest.MonkeyPatch) -> None:
    _resumes_with(patch, lambda state: replace(state, ema=state.default))


def restores_the_sampling_policy_from_the_trained_one(patch: pytest.MonkeyPatch) -> None:
    _resumes_with(patch, lambda state: replace(state, old=state.default))


# Who is told


def does_not_tell_a_new_selector_what_the_old_one_had_accepted(patch: pytest.MonkeyPatch) -> None:
    reopen = SelectorClient._reopen

    async def reopened(self: SelectorClient, plan: IterationPlan) -> None:
        self._results.pop(plan.iteration, None)
        await reopen(self, plan)

    patch.setattr(SelectorClient, "_reopen", reopened)


def does_not_tell_a_new_selector_what_the_journal_had(patch: pytest.MonkeyPatch) -> None:
    open_ = Selector.open
    patch.setattr(Selector, "open", lambda self, plan: replace(open_(self, plan), results=()))


def waits_for_nobody_who_prepares(patch: pytest.MonkeyPatch) -> None:
    async def prepare(self: Worker) -> None:
        self._world.send(self.actor, "prepare")

    patch.setattr(Worker, "prepare", prepare)


# Deadlines and budgets


def forgets_what_a_process_does_before(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def waited_for(self: Process, seconds: float | None) -> Iterator[float | None]:
        yield seconds

    patch.setattr(Process, "waited_for", waited_for)


def charges_for_workers_that_leave(patch: pytest.MonkeyPatch) -> None:
    say = Pool._report_exit

    def said(self: Pool, worker: Worker, error: BaseException | None, requeued: int) -> None:
        if worker.state is State.DRAINING and error is not None:
            self._replacements.spend(worker.name, str(error))
        say(self, worker, error, requeued)

    patch.setattr(Pool, "_report_exit", said)


def charges_for_cards_that_learners_leave_with_their_node(patch: pytest.MonkeyPatch) -> None:
    leave, renew = LearnerGroup.leave, LearnerGroup._renew

    def renewed(self: LearnerGroup) -> None:
        for process in map(self._world.process, self._ranks):
            process.counted = False
        renew(self)

    async def left(self: LearnerGroup, nodes: Collection[str]) -> None:
        with pytest.MonkeyPatch.context() as while_it_leaves:
            while_it_leaves.setattr(LearnerGroup, "_renew", renewed)
            await leave(self, nodes)

    patch.setattr(LearnerGroup, "leave", left)


def charges_for_a_lost_card_once_a_role(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Process, "counted", property(lambda self: False, lambda self, counted: None), raising=False)


def charges_for_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replacements, "spend", lambda self, worker, reason: None)


# Results


def writes_the_sampling_policy_instead_of_the_average(patch: pytest.MonkeyPatch) -> None:
    complete = CheckpointWriter._complete

    def completed(self: CheckpointWriter) -> LearnerState:
        state = complete(self)
        return replace(state, ema=state.old)

    patch.setattr(CheckpointWriter, "_complete", completed)


def forgets_the_best_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointWriter, "_best", frozenset())


def counts_rollbacks_in_one_process_only(patch: pytest.MonkeyPatch) -> None:
    brake, counts = CheckpointWriter.gone_back_to, dict[int, int]()

    async def gone_back_to(self: CheckpointWriter, updates: int) -> tuple[int, LearnerState] | None:
        back = await brake(self, updates)
        if back is None:
            return None
        counts[id(self)] = counts.get(id(self), 0) + 1
        return back[0], replace(back[1], rollbacks=counts[id(self)])

    patch.setattr(CheckpointWriter, "gone_back_to", gone_back_to)
