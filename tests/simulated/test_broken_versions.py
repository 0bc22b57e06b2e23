"""A test of the tester: versions of the code that are broken in one place are found within the seeds that are run.

A broken version is the real code with one method replaced. Each must be found by one of the first seeds, and the error
must be the one that is expected: else the simulated world would not see such a bug.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.dispatch.open_iteration import OpenIteration, RolloutResult
from actors.dispatch.selector_client import SelectorClient
from actors.dispatch.unit_router import Reply, UnitRouter
from actors.fleet.fleet import Fleet
from actors.fleet.worker import Worker as FleetWorker
from actors.training.checkpoints import CheckpointWriter
from actors.training.learner_group import LearnerGroup
from actors.workers import selector
from actors.workers.selector import Ack, Opened
from actors.world import Process
from solrl_ray.common import files
from solrl_ray.errors import InputGone
from solrl_ray.learning import state
from solrl_ray.records import UnitResult, WorkUnit
from solrl_ray.scheduling.dispatcher import Dispatcher
from solrl_ray.scheduling.ledger import Ledger, Outcome
from solrl_ray.storage import journal
from solrl_ray.storage.journal import Journal
from solrl_ray.weight_sync.publication import CARD, EXPLORER, Publication
from tests.simulated import broken_promises as promises
from tests.simulated.faults import Fault
from tests.simulated.plans import Plan
from tests.simulated.players import Worker as Player
from tests.simulated.players import number
from tests.simulated.runs import undisturbed, violation
from tests.simulated.test_seeds import SEEDS, SMALL, TWICE

Break = Callable[[pytest.MonkeyPatch], None]


def acknowledges_before_the_journal_is_written(patch: pytest.MonkeyPatch) -> None:
    late: dict[int, list[Any]] = {}
    append = Journal.append

    def appended(self: Journal, *entries: dict[str, Any]) -> None:
        append(self, *late.pop(id(self), []))
        late[id(self)] = list(entries)

    patch.setattr(Journal, "append", appended)


def keeps_what_a_lost_worker_had(patch: pytest.MonkeyPatch) -> None:
    def lost(self: Dispatcher, worker: str) -> list[WorkUnit]:
        self.not_ready(worker)
        self._workers.pop(worker, None)
        return []

    patch.setattr(Dispatcher, "lost", lost)


def gives_units_to_workers_with_another_revision(patch: pytest.MonkeyPatch) -> None:
    add, rewards = Dispatcher.add, Player._rewards

    def added(self: Dispatcher, unit: WorkUnit, **named: Any) -> None:
        holds = [mine.holds for mine in self._workers.values() if mine.holds and mine.pool == named["pool"]]
        add(self, unit, **(named | ({"holds": holds[0]} if holds else {})))

    def unchecked(self: Player, unit: WorkUnit, *of: object) -> tuple[float, ...]:
        held, self._holds = self._holds, (unit.policy, unit.revision)
        try:
            return rewards(self, unit, *of)
        finally:
            self._holds = held

    patch.setattr(Dispatcher, "add", added)
    patch.setattr(Player, "_rewards", unchecked)


def rebuilds_learners_from_revision_0(patch: pytest.MonkeyPatch) -> None:
    async def nothing() -> None:
        return None

    def begun(self: LearnerGroup, origin: str, state: Any) -> None:
        self._origin, self._beginning = origin, nothing

    patch.setattr(LearnerGroup, "_begin_with", begun)


def forgets_what_a_dead_selector_had_not_acknowledged(patch: pytest.MonkeyPatch) -> None:
    repeat, acknowledge = SelectorClient._repeat, SelectorClient._acknowledge

    async def repeated(self: SelectorClient, method: str, *arguments: Any, what: str, parts: int) -> tuple[Any, Any]:
        before = self._actor
        answer, large = await repeat(self, method, *arguments, what=what, parts=parts)
        return ([] if method == "accept" and self._actor is not before else answer), large

    def acknowledged(self: SelectorClient, pending: Sequence[Any], acks: Sequence[Ack]) -> None:
        acknowledge(self, pending if acks else [], acks)

    patch.setattr(SelectorClient, "_repeat", repeated)
    patch.setattr(SelectorClient, "_acknowledge", acknowledged)


def counts_an_iteration_before_its_checkpoint(patch: pytest.MonkeyPatch) -> None:
    async def saved(self: CheckpointWriter, state: Any, updates: int) -> float:
        self._learners.saved()
        return 0.0

    patch.setattr(CheckpointWriter, "save", saved)


def does_not_ask_for_a_lost_group_again(patch: pytest.MonkeyPatch) -> None:
    accept = SelectorClient.accept_group

    async def accepted(self: SelectorClient, iteration: int, group: Any) -> Ack:
        try:
            return await accept(self, iteration, group)
        except InputGone:
            return await asyncio.get_running_loop().create_future()

    patch.setattr(SelectorClient, "accept_group", accepted)


def makes_groups_again_that_came_with_the_revision(patch: pytest.MonkeyPatch) -> None:
    revised = OpenIteration.revised

    def started(self: OpenIteration, opened: Opened) -> None:
        again = [
            WorkUnit(
                stage="regenerate",
                iteration=group.iteration,
                revision=group.revision,
                prompt_id=group.prompt_id,
                indices=group.indices,
            )
            for group in opened.groups
        ]
        revised(self, replace(opened, groups=(), units=(*opened.units, *again)))

    patch.setattr(OpenIteration, "revised", started)


def gives_no_unit_of_a_lost_worker_to_another(patch: pytest.MonkeyPatch) -> None:
    def lost(self: UnitRouter, worker: str) -> int:
        self._workers.pop(worker, None)
        self._dispatcher.not_ready(worker)
        return len(self._dispatcher.units_of(worker))

    patch.setattr(UnitRouter, "lost", lost)


def counts_no_unit_that_goes_to_another_worker(patch: pytest.MonkeyPatch) -> None:
    def lost(self: UnitRouter, worker: str) -> int:
        self._workers.pop(worker, None)
        units = self._dispatcher.lost(worker)
        self.wake()
        return len(units)

    patch.setattr(UnitRouter, "lost", lost)


def keeps_a_request_that_was_answered(patch: pytest.MonkeyPatch) -> None:
    request = UnitRouter.request

    async def requested(self: UnitRouter, unit: WorkUnit, call: Any, **named: Any) -> Reply:
        try:
            return await request(self, unit, call, **named)
        finally:
            self._dispatcher.add(unit, pool="nobody", order=(0,))

    patch.setattr(UnitRouter, "request", requested)


def takes_refused_answers(patch: pytest.MonkeyPatch) -> None:
    accept = SelectorClient.accept

    async def accepted(self: SelectorClient, result: UnitResult) -> Ack:
        return replace(await accept(self, result), refused="")

    patch.setattr(SelectorClient, "accept", accepted)


def gives_groups_to_learners_before_they_are_accepted(patch: pytest.MonkeyPatch) -> None:
    accept = SelectorClient.accept_group

    async def accepted(self: SelectorClient, iteration: int, group: Any) -> Ack:
        work = accept(self, iteration, group)
        self.__dict__.setdefault("accepting", []).append(asyncio.ensure_future(work))
        return Ack()

    patch.setattr(SelectorClient, "accept_group", accepted)


def learns_from_groups_in_the_order_in_which_they_came(patch: pytest.MonkeyPatch) -> None:
    finish = OpenIteration.finish

    async def finished(self: OpenIteration) -> RolloutResult:
        return replace(await finish(self), groups=list(self.groups.values()))

    patch.setattr(OpenIteration, "finish", finished)


def scores_a_unit_by_who_does_it(patch: pytest.MonkeyPatch) -> None:
    rewards = Player._rewards

    def scored(self: Player, unit: WorkUnit, *of: object) -> tuple[float, ...]:
        return tuple(reward + number(self._name) for reward in rewards(self, unit, *of))

    patch.setattr(Player, "_rewards", scored)


def does_not_sync_the_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal, "sync", lambda path, file: None)


def names_a_checkpoint_before_it_is_synced(patch: pytest.MonkeyPatch) -> None:
    def replaced(folder: Path, contents: Mapping[str, bytes]) -> None:
        with pytest.MonkeyPatch.context() as unsynced:
            unsynced.setattr(files, "sync", lambda path, file: None)
            files.replace_folder(folder, contents)

    patch.setattr(state, "replace_folder", replaced)


def waits_for_a_sign_of_life_without_a_deadline(patch: pytest.MonkeyPatch) -> None:
    call = FleetWorker._call

    async def called(self: FleetWorker, method: str, *arguments: Any, what: str, seconds: Any) -> Any:
        return await call(self, method, *arguments, what=what, seconds=None if method == "alive" else seconds)

    patch.setattr(FleetWorker, "_call", called)


def counts_a_duplicate_as_a_first_result(patch: pytest.MonkeyPatch) -> None:
    finish = Ledger.finish

    def finished(self: Ledger, unit_id: str, digest: str, worker: str) -> Outcome:
        outcome = finish(self, unit_id, digest, worker)
        return Outcome.ACCEPTED if outcome is Outcome.DUPLICATE else outcome

    patch.setattr(Ledger, "finish", finished)


def replays_pruned_units_as_if_nobody_had_been_dropped(patch: pytest.MonkeyPatch) -> None:
    replay = selector.unit_result

    def replayed(entry: dict[str, Any], plan: Any) -> Any:
        result = replay(entry, plan)
        return replace(result, unit=replace(result.unit, prune=None), early=())

    patch.setattr(selector, "unit_result", replayed)


def sends_packed_weights_to_explorers_on_cards(patch: pytest.MonkeyPatch) -> None:
    made = Publication.content

    def packed(self: Publication, role: str, *, full: bool = False) -> str:
        return made(self, EXPLORER if role == CARD else role, full=full)

    patch.setattr(Publication, "content", packed)
    patch.setattr(Fleet, "needs_packed", True)


def packs_nothing_for_explorers_beyond_the_cards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "needs_packed", False)


def tells_of_a_lost_card_once_a_role(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Process, "told", property(lambda self: False, lambda self, told: None), raising=False)


BROKEN: dict[Break, str] = {
    acknowledges_before_the_journal_is_written: "acknowledged",
    keeps_what_a_lost_worker_had: "has not ended",
    gives_units_to_workers_with_another_revision: "",
    rebuilds_learners_from_revision_0: "",
    forgets_what_a_dead_selector_had_not_acknowledged: "has not ended",
    counts_an_iteration_before_its_checkpoint: "",
    does_not_ask_for_a_lost_group_again: "has not ended",
    makes_groups_again_that_came_with_the_revision: "which came with the revision",
    gives_no_unit_of_a_lost_worker_to_another: "",
    counts_no_unit_that_goes_to_another_worker: "went to others",
    keeps_a_request_that_was_answered: "units left",
    takes_refused_answers: "",
    gives_groups_to_learners_before_they_are_accepted: "before the selector accepted it",
    learns_from_groups_in_the_order_in_which_they_came: "digests",
    scores_a_unit_by_who_does_it: "digests",
    does_not_sync_the_journal: "acknowledged before it was written",
    names_a_checkpoint_before_it_is_synced: "",
    waits_for_a_sign_of_life_without_a_deadline: "has None s instead of",
    counts_a_duplicate_as_a_first_result: "",
    replays_pruned_units_as_if_nobody_had_been_dropped: "",
    sends_packed_weights_to_explorers_on_cards: "was sent something else",
    packs_nothing_for_explorers_beyond_the_cards: "has not ended",
    tells_of_a_lost_card_once_a_role: "told more than once",
    promises.renames_a_checkpoint_without_syncing_its_folder: "a loss of power may take",
    promises.replaces_a_file_without_syncing_its_folder: "a loss of power may take",
    promises.says_that_a_checkpoint_is_saved_before_it_is_written: "is not there",
    promises.does_not_wait_for_the_checkpoint_before: "dropped before its checkpoint",
    promises.ends_at_a_checkpoint_that_the_disk_does_not_give: "cannot be read",
    promises.restores_the_optimisers_steps_from_updates: "counters",
    promises.restores_the_average_from_the_trained_policy: "ema of the state",
    promises.restores_the_sampling_policy_from_the_trained_one: "old of the state",
    promises.does_not_tell_a_new_selector_what_the_old_one_had_accepted: "",
    promises.does_not_tell_a_new_selector_what_the_journal_had: "",
    promises.waits_for_nobody_who_prepares: "are used up",
    promises.forgets_what_a_process_does_before: "are used up",
    promises.charges_for_workers_that_leave: "are used up",
    promises.charges_for_cards_that_learners_leave_with_their_node: "are used up",
    promises.charges_for_a_lost_card_once_a_role: "are used up",
    promises.charges_for_nobody: "are used up",
    promises.writes_the_sampling_policy_instead_of_the_average: "is not the average",
    promises.forgets_the_best_checkpoint: "",
    promises.counts_rollbacks_in_one_process_only: "",
}
"""Broken version → what the violation says, if it always says the same."""


def _has(role: str, kind: str = "") -> Callable[[Plan], bool]:
    """Whether a plan has a fault of a role, of a kind that begins so."""
    return lambda plan: any(fault.role == role and fault.kind.startswith(kind) for fault in (*plan.faults, *plan.ends))


NEEDS: dict[Break, Callable[[Plan], bool]] = {
    **dict.fromkeys(
        (
            keeps_what_a_lost_worker_had,
            gives_no_unit_of_a_lost_worker_to_another,
            counts_no_unit_that_goes_to_another_worker,
        ),
        _has("explorer", "dies"),
    ),
    takes_refused_answers: _has("explorer", "answers NaN"),
    replays_pruned_units_as_if_nobody_had_been_dropped: (
        lambda plan: plan.shape.prune != "null" and _has("selector", "dies")(plan)
    ),
    forgets_what_a_dead_selector_had_not_acknowledged: _has("selector", "dies before"),
    counts_a_duplicate_as_a_first_result: _has("selector", "dies after"),
    tells_of_a_lost_card_once_a_role: lambda plan: plan.colocated and _has("learner", "dies")(plan),
    sends_packed_weights_to_explorers_on_cards: lambda plan: plan.colocated,
    promises.does_not_tell_a_new_selector_what_the_old_one_had_accepted: _has("selector", "dies before, and"),
    promises.does_not_wait_for_the_checkpoint_before: _has("controller", "hangs at the disk"),
    promises.ends_at_a_checkpoint_that_the_disk_does_not_give: _has("disk", "loses power and a block"),
    promises.forgets_what_a_process_does_before: _has("explorer", "is slow"),
    promises.charges_for_cards_that_learners_leave_with_their_node: (
        lambda plan: plan.colocated and _has("node", "drains")(plan)
    ),
    promises.charges_for_nobody: lambda plan: not plan.colocated,
    promises.forgets_the_best_checkpoint: lambda plan: plan.shape.iterations == 4,
}
"""Broken version → what a plan needs so that anything of it can be seen: such seeds come first."""
ONE = Plan(1, SMALL, explorers=1, regenerators=1, ranks=1, nodes=2)
AHEAD = replace(SMALL, staleness=1, unit=4, prune="null", prompts=3)
"""Explores ahead."""
SHOWN: dict[Break, list[Plan]] = {
    waits_for_a_sign_of_life_without_a_deadline: [replace(ONE, faults=(Fault("regenerator", 3, "hangs"),))],
    does_not_ask_for_a_lost_group_again: [replace(ONE, faults=(Fault("regenerator", 3, "lost its samples"),))],
    promises.ends_at_a_checkpoint_that_the_disk_does_not_give: [
        replace(ONE, seed=2, ends=(Fault("disk", operation, "loses power and a block"),))
        for operation in range(150, 300, 10)
    ],
    # The first driver dies after it has explored iteration 1 ahead and made some of its groups.
    makes_groups_again_that_came_with_the_revision: [
        replace(ONE, shape=AHEAD, ends=(Fault("controller", call, "dies"),)) for call in range(66, 96, 3)
    ],
    # The second one's selector loses a line of iteration 1, whose explorers hold the next revision by then.
    promises.does_not_tell_a_new_selector_what_the_journal_had: [
        replace(
            ONE,
            seed=seed,
            nodes=1,
            shape=replace(AHEAD, iterations=3),
            ends=(Fault("controller", dies, "dies"), Fault("selector", call, "dies before, and a line is damaged")),
        )
        for dies in range(70, 92, 5)
        for call in range(5, 14, 2)
        for seed in (1, 2)
    ],
    # All roles of a card are slow while one of them prepares, so that a sign of life comes late.
    promises.waits_for_nobody_who_prepares: [
        replace(
            ONE,
            seed=seed,
            nodes=1,
            shape=SMALL,
            colocated=True,
            faults=(
                Fault("learner", 9, "is slow"),
                Fault("regenerator", 10, "is slow"),
                Fault("explorer", 7, "is slow"),
                Fault("explorer", 8, "is slow"),
            ),
        )
        for seed in (1, 4)
    ],
    promises.charges_for_workers_that_leave: [
        replace(ONE, faults=(Fault("regenerator", call, "hangs"), Fault("node", drains, "drains")))
        for call in range(8, 20)
        for drains in range(40, 70, 5)
    ],
    promises.counts_rollbacks_in_one_process_only: [
        replace(ONE, shape=TWICE, ends=(Fault("controller", call, "dies beside the disk"),))
        for call in range(60, 200, 10)
    ],
}
"""Broken version → plans that show what seeds seldom draw; they come first."""
PLANS = {seed: Plan.of(seed) for seed in range(SEEDS)}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_version_is_found(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    shows = NEEDS.get(broken, lambda plan: True)
    for plan in (*SHOWN.get(broken, ()), *sorted(PLANS.values(), key=lambda each: not shows(each))):
        undisturbed(plan.shape)  # by the code as it is
        with monkeypatch.context() as patch:
            broken(patch)
            said = violation(plan)
        if said:
            assert BROKEN[broken] in said, f"{plan}: {said}"
            return
    pytest.fail(f"none of {SEEDS} seeds found it")
