"""The selector: which answers count, what is wanted because of them, and what its journal brings back."""

from __future__ import annotations

import itertools
import os
import re
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.workers.selector import Ack, Selector
from solrl_ray.errors import NonsenseError, RunError
from solrl_ray.records import Pruning, SampleGroup, UnitResult, WorkUnit
from solrl_ray.rollout.audit import AuditPlan
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationSummary
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.storage.run_folder import RunFolder

PLAN = IterationPlan(iteration=4, revision=4, prompt_ids=("beef", "cafe"), pool=4, keep=2, unit=2, policy_digest="aa")
AHEAD = replace(PLAN, staleness=1)
AUDIT = AuditPlan(run_seed=42, prompts=2, seeds=2)
REWARDS = {"beef": (0.1, 0.6, 0.3, 0.5), "cafe": (0.5, 0.25, 0.75, 1.0)}
"""Best and worst: 1 and 0 of beef; 3 and 1 of cafe."""

POOL = ["explore/4/beef/0-1", "explore/4/beef/2-3", "explore/4/cafe/0-1", "explore/4/cafe/2-3"]
OF_BEEF, OF_CAFE = "regenerate/4/beef/1-0", "regenerate/4/cafe/3-1"


def ids(units: tuple[WorkUnit, ...]) -> list[str]:
    return [unit.id for unit in units]


def result(unit: WorkUnit, worker: str = "explorer-0", shift: float = 0.0) -> UnitResult:
    rewards = tuple(REWARDS[unit.prompt_id][i] + shift for i in unit.indices)
    return UnitResult(unit=unit, rewards=rewards, worker=worker, score_class="c", seconds=0.1)


def group_of(unit: WorkUnit, *, rewards: tuple[float, ...] = (0.9, 0.1), latent: float = 1.0) -> SampleGroup:
    return SampleGroup(
        iteration=unit.iteration,
        revision=unit.revision,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        rewards=rewards,
        latents=torch.tensor([[latent], [2.0]]),
        worker="regenerator-0",
    )


def explore(selector: Selector, units: tuple[WorkUnit, ...]) -> tuple[WorkUnit, ...]:
    """Bring results one by one; returns the units that they lead to."""
    acks = [ack for unit in units for ack in selector.accept([result(unit)])]
    assert all(not ack.refused and ack.assemble is None for ack in acks)
    return tuple(unit for ack in acks for unit in ack.units)


def on_disk(selector: Selector, group: SampleGroup) -> Outcome:
    """Bring a group, and wait until it is written."""
    outcome = selector.record_group(group)
    selector._of(group.iteration).settle(wait=True)
    return outcome


def begun(folder: Path) -> Selector:
    """Both prompts are explored but for one unit, and the first one is regenerated."""
    selector = Selector(folder)
    opened = selector.open(PLAN)
    assert (opened.groups, opened.candidates, opened.message) == ((), 0, "")
    assert ids(opened.units) == POOL
    (regenerate,) = explore(selector, opened.units[:3])
    assert regenerate.id == OF_BEEF
    on_disk(selector, group_of(regenerate))
    return selector


def entries(selector: Selector) -> list[str]:
    """What its journal's lines are about."""
    return [entry["kind"] for entry in selector._of(4).journal.entries()]


def test_an_acknowledgement_says_which_units_are_wanted_because_of_it(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    first, second, third, fourth = selector.open(PLAN).units
    assert selector.accept([result(second)]) == [Ack()]
    assert ids(selector.wanted(4)) == [POOL[0], *POOL[2:]]
    (ack,) = selector.accept([result(first)])
    assert ids(ack.units) == [OF_BEEF]
    assert selector.accept([result(first)]) == [Ack()]  # it was said already
    (regenerate,) = ack.units
    assert (regenerate.stage, regenerate.revision, regenerate.indices) == ("regenerate", 4, (1, 0))
    assert ids(selector.wanted(4)) == [OF_BEEF, *POOL[2:]]
    assert selector.accept_groups(group_of(regenerate)) == [Ack()]
    nothing, last = selector.accept([result(third), result(fourth)])
    assert (nothing, ids(last.units)) == (Ack(), [OF_CAFE])
    assert ids(selector.wanted(4)) == [OF_CAFE]
    assert selector.accept_groups(group_of(last.units[0])) == [Ack()]
    assert selector.wanted(4) == ()
    assert selector.close(4).counts.groups == 2


def test_an_iteration_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    begun(tmp_path)
    again = Selector(tmp_path)
    opened = again.open(PLAN)
    assert [group.prompt_id for group in opened.groups] == ["beef"]
    assert opened.groups[0].indices == (1, 0)
    assert opened.candidates == 6
    assert opened.message == ""
    assert ids(opened.units) == [POOL[3]]
    (last,) = explore(again, opened.units)
    on_disk(again, group_of(last))
    assert [s.prompt_id for s in again.close(4).selections] == ["beef", "cafe"]


def test_a_damaged_line_in_the_middle_is_told_with_what_is_computed_again(tmp_path: Path) -> None:
    path = begun(tmp_path)._of(4).journal.path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"', b"'", 1), *lines[3:]]))
    opened = Selector(tmp_path).open(PLAN)
    after = len(lines) - 3
    assert opened.message == (
        f"line 3 of {path.name} is damaged; it and the {after} after it, of iteration 4, are computed again"
    )
    assert opened.candidates == 2
    assert Selector(tmp_path).open(PLAN).message == ""  # the journal goes on from there


def test_a_journal_that_is_cut_anywhere_leads_to_the_same_iteration(tmp_path: Path) -> None:
    whole = begun(tmp_path / "whole")
    (last,) = explore(whole, whole.wanted(4))
    on_disk(whole, group_of(last))
    expected = whole.close(4)
    journal = next((tmp_path / "whole").rglob("*.jsonl")).read_bytes()
    ends = [position + 1 for position, byte in enumerate(journal) if byte == ord("\n")]
    assert len(ends) == 1 + 4 + 2 + 2
    cuts = {0, 1, *ends, *(end - 1 for end in ends), *((a + b) // 2 for a, b in itertools.pairwise(ends))}
    for cut in sorted(cuts):
        folder = tmp_path / f"cut-{cut}"
        path = RunFolder(folder).journal(4).path
        path.parent.mkdir(parents=True)
        path.write_bytes(journal[:cut])
        selector = Selector(folder)
        opened = selector.open(PLAN)
        held = sum(end <= cut for end in ends)
        assert opened.candidates == 2 * journal[: ends[held - 1] if held else 0].count(b'"kind":"explore"')
        assert opened.groups == ()  # none of their files is there
        wanted = opened.units
        while wanted:
            groups = [group_of(unit) for unit in wanted if unit.stage == "regenerate"]
            acks = selector.accept([result(unit) for unit in wanted if unit.stage == "explore"])
            assert selector.accept_groups(*groups) == [Ack()] * len(groups)
            wanted = tuple(unit for ack in acks for unit in ack.units)
        assert selector.wanted(4) == ()
        assert selector.close(4) == expected
        again = Selector(folder).open(PLAN)
        assert (again.units, again.candidates, len(again.groups)) == ((), 8, 2)


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[: len(whole) // 2], lambda whole: whole.replace(b"[1, 0]", b"[3, 0]")]
)
def test_a_stored_group_that_is_not_whole_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    begun(tmp_path)
    path = next(tmp_path.rglob("beef.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    again = Selector(tmp_path)
    opened = again.open(PLAN)
    assert (opened.groups, opened.candidates) == ((), 6)
    assert ids(opened.units) == [OF_BEEF, POOL[3]]
    on_disk(again, group_of(opened.units[0]))
    assert path.read_bytes() == whole


def test_a_stored_group_that_is_not_whole_when_it_is_asked_for_is_made_again(tmp_path: Path) -> None:
    selector = begun(tmp_path)
    units, group = selector.stored(4, "beef")
    assert units == ()
    assert group is not None
    path = next(tmp_path.rglob("beef.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    for _ in range(2):
        units, group = selector.stored(4, "beef")
        assert (ids(units), group) == ([OF_BEEF], None)
    assert ids(selector.wanted(4)) == [OF_BEEF, POOL[3]]
    assert on_disk(selector, group_of(units[0])) is Outcome.RESTORED
    assert path.read_bytes() == whole
    assert selector.stored(4, "beef")[0] == ()
    assert on_disk(selector, group_of(units[0])) is Outcome.DUPLICATE
    assert entries(selector).count("regenerate") == 1


def test_a_lost_group_that_comes_back_with_other_bytes_ends_the_run(tmp_path: Path) -> None:
    selector = begun(tmp_path)
    next(tmp_path.rglob("beef.safetensors")).unlink()
    (unit,), _ = selector.stored(4, "beef")
    with pytest.raises(RunError, match="whose samples are lost"):
        selector.accept_groups(group_of(unit, rewards=(0.9, 0.2)))


def test_a_journal_of_another_policy_is_set_aside_and_the_iteration_done_anew(tmp_path: Path) -> None:
    begun(tmp_path)
    opened = Selector(tmp_path).open(replace(PLAN, policy_digest="bb"))
    assert (opened.groups, opened.candidates) == ((), 0)
    assert opened.message == (
        "iteration 4 is done again: iteration-000004.jsonl.stale was made by another revision's bytes"
    )
    assert ids(opened.units) == POOL
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [
        "iteration-000004.jsonl",
        "iteration-000004.jsonl.stale",
    ]


def test_a_resumed_run_does_not_mix_scores_with_those_of_other_hardware(tmp_path: Path) -> None:
    Selector(tmp_path).open(replace(PLAN, score_class="a/b"))
    opened = Selector(tmp_path).open(replace(PLAN, score_class="c/b"))
    assert opened.candidates == 0
    assert opened.message == (
        "iteration 4 is done again: iteration-000004.jsonl.stale was made by workers of other score classes "
        "(another device, thread count or library), or with other prompts"
    )
    assert Selector(tmp_path).open(replace(PLAN, score_class="c/b")).message == ""
    other = replace(PLAN, score_class="c/b", kinds=("", "l40s"))  # each kind explores prompts of its own
    assert "was made by workers of other score classes" in Selector(tmp_path).open(other).message


@pytest.mark.parametrize("changes", [{"prompt_ids": ("beef", "f00d")}, {"keep": 4}, {"pool": 6, "policy_digest": "bb"}])
def test_a_journal_of_another_plan_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    begun(tmp_path)
    with pytest.raises(RunError, match="was begun with another plan"):
        Selector(tmp_path).open(replace(PLAN, **changes))
    assert not list((tmp_path / "journal").glob("*.stale"))


def test_audits_that_are_done_are_not_done_again_after_a_restart(tmp_path: Path) -> None:
    plan = replace(PLAN, audit=AUDIT)
    selector = Selector(tmp_path)
    led_to = explore(selector, selector.open(plan).units)
    assert [unit.stage for unit in led_to] == ["regenerate", "audit"] * 2  # what is learned from comes first
    assert led_to[1].indices == (2, 3)  # of beef; those that were not chosen
    _, done, _, lost = led_to
    answer = replace(result(done, "regenerator-0"), rewards=(0.5, 0.4))
    assert selector.accept([answer]) == [Ack()]
    again = Selector(tmp_path)
    opened = again.open(plan)
    assert opened.audits == (done.prompt_id,)
    assert opened.units == (led_to[0], led_to[2], lost)
    (ack,) = again.accept([replace(answer, unit=lost, rewards=(0.5,))])
    assert "refused an audit of regenerator-0" in ack.refused
    assert lost in again.wanted(4)


def test_a_result_that_comes_again_with_other_bytes_is_counted_or_ends_a_strict_run(tmp_path: Path) -> None:
    for strict in (False, True):
        selector = Selector(tmp_path / str(strict), strict)
        unit, *left = selector.open(PLAN).units
        selector.accept([result(unit)])
        sentence = f"explorer-1 brought other bytes for {unit.in_words} than explorer-0"
        if strict:
            with pytest.raises(RunError, match=re.escape(sentence) + ", and fleet.strict is true"):
                selector.accept([result(unit, "explorer-1", shift=1.0)])
            continue
        assert selector.accept([result(unit, "explorer-1", shift=1.0)]) == [Ack()]
        for ready in explore(selector, tuple(left)):
            made = group_of(ready)
            assert selector.record_group(made) is Outcome.ACCEPTED
            assert selector.record_group(replace(made, rewards=(0.9, 0.2))) is Outcome.VIOLATION
        summary = selector.close(4)
        assert summary.counts.violations == len(summary.violations) == 3
        assert summary.violations[0] == sentence
        assert summary.selections[0].best[0].index == 1  # as by the first result


def test_an_answer_that_cannot_be_right_is_refused_and_its_unit_stays_wanted(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    units = selector.open(PLAN).units
    wrong = (
        replace(result(units[1]), rewards=(0.5, float("nan"))),
        replace(result(units[1]), rewards=(0.5,)),
        result(replace(units[1], revision=3)),
        result(replace(units[1], prompt_id="cafe", indices=(1, 2))),
    )
    for answer in wrong:
        (ack,) = selector.accept([answer])
        assert ack.refused.startswith("refused a result of explorer-0: ")
        assert (ack.units, ack.assemble) == ((), None)
    assert selector.wanted(4) == units
    assert entries(selector) == ["open"]


def test_of_results_brought_together_each_counts_by_itself_and_the_journal_is_as_one_by_one(tmp_path: Path) -> None:
    alone, together = Selector(tmp_path / "alone"), Selector(tmp_path / "together")
    units = alone.open(PLAN).units
    together.open(PLAN)
    results = [result(unit) for unit in units]
    one_by_one = [alone.accept([each])[0] for each in results]
    wrong = replace(results[2], rewards=(0.5, float("nan")))
    acks = together.accept([*results[:2], wrong, *results[2:], results[0]])
    assert [ack.units for ack in acks] == [each.units for each in [*one_by_one[:2], Ack(), *one_by_one[2:], Ack()]]
    assert [bool(ack.refused) for ack in acks] == [False, False, True, False, False, False]
    assert "refused a result of explorer-0" in acks[2].refused
    groups = [group_of(unit) for ack in one_by_one for unit in ack.units]
    for group in groups:
        alone.record_group(group)
    stray = replace(groups[0], indices=(3, 2))
    acks = together.accept_groups(*groups, stray, groups[1])
    assert [bool(ack.refused) for ack in acks] == [False, False, True, False]
    assert [selector.close(4).counts.duplicates for selector in (alone, together)] == [0, 2]
    lines = [sorted((tmp_path / name).rglob("*.jsonl"))[0].read_text().splitlines() for name in ("alone", "together")]
    assert len(lines[0]) == 1 + 4 + 2 + 2
    assert lines[1] == lines[0]
    again = Selector(tmp_path / "together").open(PLAN)
    assert {group.prompt_id for group in again.groups} == {"beef", "cafe"}
    assert again.candidates == 8


def test_results_that_are_brought_together_wait_for_the_disk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, prompt_ids=tuple(f"{n:04x}" for n in range(50)), pool=4)
    selector = Selector(tmp_path)
    units = selector.open(plan).units
    assert len(units) == 100
    journal, waits = selector._of(4).journal.path, list[int]()
    sync = os.fsync

    def counted(descriptor: int) -> None:
        sync(descriptor)
        waits.append(journal.read_bytes().count(b"\n"))

    monkeypatch.setattr(os, "fsync", counted)
    rewards = [(0.1 * (unit.indices[0] + 1), 0.2) for unit in units]
    results = [replace(result(replace(unit, prompt_id="beef")), unit=unit) for unit in units]
    acks = selector.accept([replace(each, rewards=r) for each, r in zip(results, rewards, strict=True)])
    assert sum(len(ack.units) for ack in acks) == 50
    assert waits == [1 + 100 + 50]  # all lines are there when it is waited for


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

    def record_group(self, group: SampleGroup) -> Outcome:
        outcome = super().record_group(group)
        time.sleep(0.05)  # a writer would have begun
        self.happened.append("judged")
        return outcome


def test_groups_are_written_when_those_that_came_with_them_are_judged(tmp_path: Path) -> None:
    selector = Judging(tmp_path)
    led_to = explore(selector, selector.open(PLAN).units)
    selector.accept_groups(*[group_of(unit) for unit in led_to])
    selector.close(4)
    assert selector.happened == ["judged", "judged", "written", "written"]


def test_groups_that_are_brought_again_after_a_restart_count_once(tmp_path: Path) -> None:
    selector = begun(tmp_path)
    (last,) = explore(selector, selector.wanted(4))
    written, unwritten = group_of(replace(last, prompt_id="beef", indices=(1, 0))), group_of(last)
    again = Selector(tmp_path)
    assert ids(again.open(PLAN).units) == [OF_CAFE]
    again.accept_again(written, unwritten)
    assert again.wanted(4) == ()
    counts = again.close(4).counts
    assert (counts.groups, counts.duplicates) == (2, 0)
    assert entries(again).count("regenerate") == 2


def test_an_iteration_is_closed_when_everything_is_in_and_not_before(tmp_path: Path) -> None:
    selector = begun(tmp_path)
    assert selector.close(4) == selector.wanted(4) != ()
    (last,) = explore(selector, selector.wanted(4))
    selector.accept_groups(group_of(last))
    summary = selector.close(4)
    assert isinstance(summary, IterationSummary)
    assert summary.proxy_mean == pytest.approx((1.5 + 2.5) / 8)
    assert [[c.index for c in selection.chosen] for selection in summary.selections] == [[1, 0], [3, 1]]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2  # all of it is on the disk then


def test_two_iterations_are_open_at_a_time_and_do_not_mix(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    of_three = selector.open(replace(PLAN, iteration=3, revision=3)).units
    of_four = selector.open(AHEAD).units
    assert (of_three[0].id, of_three[0].revision) == ("explore/3/beef/0-1", 3)
    assert (of_four[0].id, of_four[0].revision) == ("explore/4/beef/0-1", 3)
    selector.accept([result(of_three[0]), result(of_four[1])])
    assert selector.wanted(3) == of_three[1:]
    assert selector.wanted(4) == (of_four[0], *of_four[2:])
    selector.drop(3)
    with pytest.raises(RunError, match=r"asked about iteration 3, but \[4\] are open"):
        selector.close(3)
    with pytest.raises(NonsenseError, match="made a group of iteration 3, which is not open"):
        selector.record_group(group_of(replace(of_three[0], stage="regenerate")))
    selector.drop(3)  # nothing to do


def test_what_was_explored_ahead_is_kept_and_what_was_regenerated_only_of_the_same_policy(tmp_path: Path) -> None:
    first = Selector(tmp_path)
    units = first.open(AHEAD).units
    assert {unit.revision for unit in units} == {3}
    ready, unfinished = explore(first, units)
    assert (ready.revision, unfinished.revision) == (4, 4)
    assert first.revise(4, "bb").units == (ready, unfinished)
    on_disk(first, group_of(ready))

    same = Selector(tmp_path)
    opened = same.open(AHEAD)
    # Not before it is known what they are regenerated with.
    assert (opened.candidates, opened.groups, opened.units, same.wanted(4)) == (8, (), (), ())
    revised = same.revise(4, "bb")
    assert [group.prompt_id for group in revised.groups] == [ready.prompt_id]
    assert revised.units == same.wanted(4) == (unfinished,)

    other = Selector(tmp_path)
    other.open(AHEAD)
    revised = other.revise(4, "cc")
    assert (revised.groups, revised.units) == ((), (ready, unfinished))
    on_disk(other, group_of(ready, latent=7.0))

    again = Selector(tmp_path)
    again.open(AHEAD)
    assert [group.latents.tolist() for group in again.revise(4, "cc").groups] == [[[7.0], [2.0]]]


def test_audits_are_of_the_current_revision_and_an_answer_of_the_other_one_is_refused(tmp_path: Path) -> None:
    plan = replace(AHEAD, audit=AUDIT)
    selector = Selector(tmp_path)
    units = selector.open(plan).units
    (ack,) = selector.accept([result(replace(units[0], revision=4))])
    assert "revision 4; expected iteration 5, revision 3" in ack.refused
    led_to = explore(selector, units)
    selector.revise(4, "bb")
    assert [(unit.stage, unit.revision) for unit in led_to] == [("regenerate", 4), ("audit", 4)] * 2
    audit = led_to[1]
    assert selector.accept([replace(result(audit), rewards=(0.1, 0.2), worker="r")]) == [Ack()]
    again = Selector(tmp_path)
    opened = again.open(plan)
    assert (opened.audits, opened.units) == ((), ())
    revised = again.revise(4, "bb")
    assert revised.audits == (audit.prompt_id,)
    assert [unit.stage for unit in revised.units] == ["regenerate", "regenerate", "audit"]


def test_the_journal_keeps_early_scores_and_who_was_dropped_and_brings_them_back(tmp_path: Path) -> None:
    plan = replace(PLAN, unit=4, prune=Pruning(after=2, keep=2))
    selector = Selector(tmp_path)
    beef, _ = selector.open(plan).units
    early = float32(0.1, 0.3, 0.2, 0.5)  # 0 and 3 go on
    rewards = (*float32(0.7), *early[1:3], *float32(0.6))
    (ack,) = selector.accept([replace(result(beef), rewards=rewards, early=early)])
    assert ids(ack.units) == ["regenerate/4/beef/0-3"]
    header, entry, _ = selector._of(4).journal.entries()
    assert header["plan"]["prune"] == {"after": 2, "keep": 2}
    assert (entry["dropped"], entry["early"]) == ([1, 2], struct.pack("<4f", *early).hex())
    again = Selector(tmp_path)
    opened = again.open(plan)
    assert ids(opened.units) == ["regenerate/4/beef/0-3", "explore/4/cafe/0-3"]
    assert again._of(4).state.counts() == selector._of(4).state.counts()
    with pytest.raises(RunError, match="was begun with another plan"):
        Selector(tmp_path).open(replace(plan, prune=Pruning(after=1, keep=2)))


def float32(*values: float) -> tuple[float, ...]:
    return struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values))
