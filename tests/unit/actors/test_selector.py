"""The selector's journal: what is gone on with, what is set aside, what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.workers.selector import Selector
from solrl_ray.errors import NonsenseError, RunError
from solrl_ray.records import SampleGroup, UnitResult, WorkUnit
from solrl_ray.rollout.audit import AuditPlan
from solrl_ray.scheduling.iteration_state import IterationPlan
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.storage.run_folder import RunFolder

PLAN = IterationPlan(
    iteration=4, revision=4, prompt_ids=("beef", "cafe"), pool=4, keep=2, micro_batch=2, policy_digest="aa"
)
REWARDS = {"beef": (0.1, 0.6, 0.3, 0.5), "cafe": (0.5, 0.25, 0.75, 1.0)}


def work(folder: Path) -> Selector:
    """Explore both prompts but for one unit, and regenerate the first prompt."""
    selector = Selector(folder)
    opened = selector.open(PLAN)
    assert (opened.groups, opened.candidates, opened.message) == ((), 0, "")
    for _, unit in selector.lease(4, "explore", ["explorer-0"] * 3):
        rewards = tuple(REWARDS[unit.prompt_id][i] for i in unit.indices)
        ready = selector.record(
            UnitResult(unit=unit, rewards=rewards, worker="explorer-0", score_class="c", seconds=0.1)
        )
        if ready is not None:
            regenerate(selector, ready)
    return selector


def stored(selector: Selector, group: SampleGroup) -> Outcome:
    """Bring a group, and wait until it is on the disk."""
    outcome = selector.store(group)
    selector._of(group.iteration).settle(wait=True)
    return outcome


def regenerate(selector: Selector, unit: WorkUnit, *, rewards: tuple[float, ...] = (0.9, 0.1)) -> Outcome:
    return stored(
        selector,
        SampleGroup(
            iteration=4,
            revision=4,
            prompt_id=unit.prompt_id,
            indices=unit.indices,
            rewards=rewards,
            latents=torch.tensor([[1.0], [2.0]]),
        ),
    )


def test_an_iteration_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    work(tmp_path)
    again = Selector(tmp_path)
    opened = again.open(PLAN)
    assert [group.prompt_id for group in opened.groups] == ["beef"]
    assert opened.groups[0].indices == (1, 0)
    assert opened.candidates == 6
    assert opened.message == ""
    assert [unit.id for _, unit in again.lease(4, "explore", ["explorer-0"] * 3)] == ["explore/4/cafe/2-3"]


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[: len(whole) // 2], lambda whole: whole.replace(b"[1, 0]", b"[3, 0]")]
)
def test_a_stored_group_that_is_not_whole_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    work(tmp_path)
    path = next(tmp_path.rglob("beef.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    again = Selector(tmp_path)
    opened = again.open(PLAN)
    assert (opened.groups, opened.candidates) == ((), 6)
    [(_, unit)] = again.lease(4, "regenerate", ["regenerator-0"])
    assert unit.id == "regenerate/4/beef/1-0"
    regenerate(again, unit)
    assert path.read_bytes() == whole


def test_a_stored_group_that_is_not_whole_when_it_is_asked_for_is_made_again(tmp_path: Path) -> None:
    selector = work(tmp_path)
    there, group = selector.stored(4, "beef")
    assert there
    assert group is not None
    path = next(tmp_path.rglob("beef.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert selector.stored(4, "beef") == (False, None)
    assert selector.stored(4, "beef") == (False, None)
    [(_, unit)] = selector.lease(4, "regenerate", ["regenerator-0"] * 2)
    assert unit.id == "regenerate/4/beef/1-0"
    assert regenerate(selector, unit) is Outcome.RESTORED
    assert path.read_bytes() == whole
    assert selector.stored(4, "beef")[0]
    assert regenerate(selector, unit) is Outcome.DUPLICATE
    assert [entry["kind"] for entry in selector._of(4).journal.entries()].count("regenerate") == 1


def test_a_lost_group_that_comes_back_with_other_bytes_ends_the_run(tmp_path: Path) -> None:
    selector = work(tmp_path)
    next(tmp_path.rglob("beef.safetensors")).unlink()
    selector.stored(4, "beef")
    [(_, unit)] = selector.lease(4, "regenerate", ["regenerator-0"])
    with pytest.raises(RunError, match="whose samples are lost"):
        regenerate(selector, unit, rewards=(0.9, 0.2))


def test_a_journal_of_another_policy_is_set_aside_and_the_iteration_done_anew(tmp_path: Path) -> None:
    work(tmp_path)
    again = Selector(tmp_path)
    opened = again.open(replace(PLAN, policy_digest="bb"))
    assert (opened.groups, opened.candidates) == ((), 0)
    assert opened.message == (
        "iteration 4 is done anew: iteration-000004.jsonl.stale was made by another revision's bytes"
    )
    assert len(again.lease(4, "explore", ["explorer-0"] * 9)) == 4
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [
        "iteration-000004.jsonl",
        "iteration-000004.jsonl.stale",
    ]


def test_a_resumed_run_does_not_mix_scores_with_those_of_other_hardware(tmp_path: Path) -> None:
    begun = Selector(tmp_path)
    begun.open(replace(PLAN, score_class="a/b"))
    opened = Selector(tmp_path).open(replace(PLAN, score_class="c/b"))
    assert opened.candidates == 0
    assert opened.message == (
        "iteration 4 is done anew: iteration-000004.jsonl.stale was made by workers that score otherwise "
        "(another device, thread count or library, or other prompts each)"
    )
    assert Selector(tmp_path).open(replace(PLAN, score_class="c/b")).message == ""
    other = replace(PLAN, score_class="c/b", kinds=("", "l40s"))  # each kind explores prompts of its own
    assert "was made by workers that score otherwise" in Selector(tmp_path).open(other).message


@pytest.mark.parametrize("changes", [{"prompt_ids": ("beef", "f00d")}, {"keep": 4}, {"pool": 6, "policy_digest": "bb"}])
def test_a_journal_of_another_plan_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    work(tmp_path)
    with pytest.raises(RunError, match="was begun with another plan"):
        Selector(tmp_path).open(replace(PLAN, **changes))
    assert not list((tmp_path / "journal").glob("*.stale"))


def test_audits_that_are_done_are_not_done_again_after_a_restart(tmp_path: Path) -> None:
    plan = replace(PLAN, audit=AuditPlan(run_seed=42, prompts=2, seeds=2))
    selector = Selector(tmp_path)
    selector.open(plan)
    for _, unit in selector.lease(4, "explore", ["explorer-0"] * 4):
        rewards = tuple(REWARDS[unit.prompt_id][i] for i in unit.indices)
        selector.record(UnitResult(unit=unit, rewards=rewards, worker="explorer-0", score_class="c", seconds=0.1))
    leased = [unit for _, unit in selector.lease(4, "regenerate", ["regenerator-0"] * 4)]
    assert [unit.stage for unit in leased] == [
        "regenerate",
        "regenerate",
        "audit",
        "audit",
    ]  # what is learned from goes first
    done, lost = leased[2:]
    selector.record_audit(UnitResult(unit=done, rewards=(0.5, 0.4), worker="r", score_class="c", seconds=0.1))
    again = Selector(tmp_path)
    assert again.open(plan).audits == (done.prompt_id,)
    waiting = [unit for _, unit in again.lease(4, "regenerate", ["regenerator-0"] * 4)]
    assert [unit.id for unit in waiting if unit.stage == "audit"] == [lost.id]
    assert again.release("regenerator-0")[-1] == lost.id
    again.hold([("regenerator-0", lost)])  # it is at work already
    assert "audit" not in [unit.stage for _, unit in again.lease(4, "regenerate", ["regenerator-1"] * 4)]
    with pytest.raises(RunError, match="refused an audit of r"):
        again.record_audit(UnitResult(unit=lost, rewards=(0.5,), worker="r", score_class="c", seconds=0.1))


def result(unit: WorkUnit, worker: str, shift: float = 0.0) -> UnitResult:
    rewards = tuple(REWARDS[unit.prompt_id][i] + shift for i in unit.indices)
    return UnitResult(unit=unit, rewards=rewards, worker=worker, score_class="c", seconds=0.1)


def test_a_result_that_comes_again_with_other_bytes_is_counted_or_ends_a_strict_run(tmp_path: Path) -> None:
    for strict in (False, True):
        selector = Selector(tmp_path / str(strict), strict)
        selector.open(PLAN)
        ((_, unit),) = selector.lease(4, "explore", ["explorer-0"])
        selector.record(result(unit, "explorer-0"))
        sentence = f"explorer-1 brought other bytes for {unit.id} than explorer-0"
        if strict:
            with pytest.raises(RunError, match=sentence + ", and fleet.strict is true"):
                selector.record(result(unit, "explorer-1", shift=1.0))
            continue
        assert selector.record(result(unit, "explorer-1", shift=1.0)) is None
        for _, left in selector.lease(4, "explore", ["explorer-0"] * 3):
            selector.record(result(left, "explorer-0"))
        for _, ready in selector.lease(4, "regenerate", ["regenerator-0"] * 2):
            made = replace(regenerated(ready), worker="regenerator-0")
            assert selector.store(made) is Outcome.ACCEPTED
            assert selector.store(replace(made, rewards=(0.9, 0.2))) is Outcome.VIOLATION
        closed = selector.close(4)
        assert closed.counts.violations == len(closed.violations) == 3
        assert closed.violations[0] == sentence
        assert closed.selections[0].best[0].index == 1  # as by the first result


def test_an_answer_that_cannot_be_right_is_refused_and_its_unit_done_again(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    selector.open(PLAN)
    leased = [unit for _, unit in selector.lease(4, "explore", ["explorer-0"] * 4)]
    wrong = (
        replace(result(leased[1], "explorer-0"), rewards=(0.5, float("nan"))),
        replace(result(leased[1], "explorer-0"), rewards=(0.5,)),
        result(replace(leased[1], revision=3), "explorer-0"),
        result(replace(leased[1], prompt_id="cafe", indices=(1, 2)), "explorer-0"),
    )
    for answer in wrong:
        with pytest.raises(NonsenseError, match="refused a result of explorer-0"):
            selector.record(answer)
    selector.requeue(leased[1], "explorer-0")
    assert selector.lease(4, "explore", ["explorer-1"] * 2) == [("explorer-1", leased[1])]


def test_of_results_brought_together_each_counts_by_itself_and_the_journal_is_as_one_by_one(tmp_path: Path) -> None:
    alone, together = Selector(tmp_path / "alone"), Selector(tmp_path / "together")
    alone.open(PLAN)
    together.open(PLAN)
    results = [result(unit, "explorer-0") for _, unit in together.lease(4, "explore", ["explorer-0"] * 4)]
    ready = [alone.record(each) for each in results]
    wrong = replace(results[2], rewards=(0.5, float("nan")))
    taken = together.take([*results[:2], wrong, *results[2:], results[0]])
    assert [each.regenerate for each in taken] == [*ready[:2], None, *ready[2:], None]
    assert [bool(each.refused) for each in taken] == [False, False, True, False, False, False]
    assert "refused a result of explorer-0" in taken[2].refused
    groups = [regenerated(unit) for unit in ready if unit is not None]
    for group in groups:
        alone.store(group)
    stray = replace(groups[0], indices=(3, 2))
    taken = together.take_groups(*groups, stray, groups[1])
    assert [bool(each.refused) for each in taken] == [False, False, True, False]
    assert [selector.close(4).counts.duplicates for selector in (alone, together)] == [0, 2]
    lines = [sorted((tmp_path / name).rglob("*.jsonl"))[0].read_text().splitlines() for name in ("alone", "together")]
    assert len(lines[0]) == 1 + 4 + 2 + 2
    assert lines[1] == lines[0]
    again = Selector(tmp_path / "together").open(PLAN)
    assert {group.prompt_id for group in again.groups} == {"beef", "cafe"}
    assert again.candidates == 8


class Noting(RunFolder):
    def __init__(self, path: Path, happened: list[str]) -> None:
        super().__init__(path)
        self._happened = happened

    def save_group(self, group: SampleGroup) -> None:
        self._happened.append("written")


class Judging(Selector):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.happened: list[str] = []
        self._folder = Noting(path, self.happened)

    def store(self, group: SampleGroup) -> Outcome:
        outcome = super().store(group)
        time.sleep(0.05)  # a writer would have begun
        self.happened.append("judged")
        return outcome


def test_groups_are_written_when_those_that_came_with_them_are_judged(tmp_path: Path) -> None:
    selector = Judging(tmp_path)
    selector.open(PLAN)
    taken = selector.take([result(unit, "explorer-0") for _, unit in selector.lease(4, "explore", ["explorer-0"] * 4)])
    selector.take_groups(*[regenerated(each.regenerate) for each in taken if each.regenerate is not None])
    selector.close(4)
    assert selector.happened == ["judged", "judged", "written", "written"]


AHEAD = replace(PLAN, staleness=1)


def preview(selector: Selector, count: int) -> None:
    for _, unit in selector.lease(4, "explore", ["explorer-0"] * count):
        assert unit.revision == 3
        rewards = tuple(REWARDS[unit.prompt_id][i] for i in unit.indices)
        selector.record(UnitResult(unit=unit, rewards=rewards, worker="explorer-0", score_class="c", seconds=0.1))


def regenerated(unit: WorkUnit, latents: float = 1.0) -> SampleGroup:
    return SampleGroup(
        iteration=unit.iteration,
        revision=unit.revision,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        rewards=(0.9, 0.1),
        latents=torch.full((2, 1), latents),
    )


def test_two_iterations_are_open_at_a_time_and_do_not_mix(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    selector.open(replace(PLAN, iteration=3, revision=3))
    selector.open(AHEAD)
    (_, of_three), (_, of_four) = (selector.lease(i, "explore", ["explorer-0"])[0] for i in (3, 4))
    assert (of_three.id, of_three.revision) == ("explore/3/beef/0-1", 3)
    assert (of_four.id, of_four.revision) == ("explore/4/beef/0-1", 3)
    assert selector.release("explorer-0") == (of_three.id, of_four.id)
    selector.hold([("explorer-0", of_three)])
    assert selector.lease(3, "explore", ["explorer-1"])[0][1].id == "explore/3/beef/2-3"
    assert selector.lease(4, "explore", ["explorer-1"])[0][1].id == of_four.id
    selector.drop(3)
    with pytest.raises(RunError, match=r"asked about iteration 3, but \[4\] are open"):
        selector.close(3)
    with pytest.raises(RunError, match="made a group of iteration 3, which is not open"):
        selector.store(regenerated(replace(of_three, stage="regenerate")))


def test_what_was_explored_ahead_is_kept_and_what_was_regenerated_only_of_the_same_policy(tmp_path: Path) -> None:
    first = Selector(tmp_path)
    first.open(AHEAD)
    preview(first, 4)
    first.revise(4, "bb")
    (_, ready), (_, unfinished) = first.lease(4, "regenerate", ["regenerator-0"] * 2)
    assert (ready.revision, unfinished.revision) == (4, 4)
    stored(first, regenerated(ready))

    same = Selector(tmp_path)
    opened = same.open(AHEAD)
    assert (opened.candidates, opened.groups) == (8, ())  # not before it is known what they are regenerated with
    assert [group.prompt_id for group in same.revise(4, "bb").groups] == [ready.prompt_id]
    assert [unit for _, unit in same.lease(4, "regenerate", ["regenerator-0"] * 2)] == [unfinished]

    other = Selector(tmp_path)
    assert other.open(AHEAD).candidates == 8
    assert other.revise(4, "cc").groups == ()
    assert [unit for _, unit in other.lease(4, "regenerate", ["regenerator-0"] * 2)] == [ready, unfinished]
    stored(other, regenerated(ready, latents=2.0))

    again = Selector(tmp_path)
    again.open(AHEAD)
    assert [group.latents.tolist() for group in again.revise(4, "cc").groups] == [[[2.0], [2.0]]]


def test_audits_are_of_the_current_revision_and_an_answer_of_the_other_one_is_refused(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    selector.open(replace(AHEAD, audit=AuditPlan(run_seed=42, prompts=2, seeds=2)))
    (_, unit), *_ = selector.lease(4, "explore", ["explorer-0"])
    newest = replace(unit, revision=4)
    with pytest.raises(NonsenseError, match="revision 4; expected 4, 3"):
        selector.record(UnitResult(unit=newest, rewards=(0.1, 0.2), worker="e", score_class="c", seconds=0.1))
    selector.requeue(unit, "explorer-0")
    preview(selector, 4)
    selector.revise(4, "bb")
    units = [unit for _, unit in selector.lease(4, "regenerate", ["regenerator-0"] * 4)]
    assert [(unit.stage, unit.revision) for unit in units] == [("regenerate", 4)] * 2 + [("audit", 4)] * 2
    selector.record_audit(UnitResult(unit=units[2], rewards=(0.1, 0.2), worker="r", score_class="c", seconds=0.1))
    again = Selector(tmp_path)
    assert again.open(replace(AHEAD, audit=AuditPlan(run_seed=42, prompts=2, seeds=2))).audits == ()
    assert again.revise(4, "bb").audits == (units[2].prompt_id,)
