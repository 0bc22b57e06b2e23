"""The selector: which answers count, and what is wanted because of them."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from actors.workers.selector import Ack, Selector
from solrl_ray.errors import NonsenseError, RunError
from solrl_ray.records import SampleGroup
from solrl_ray.scheduling.iteration_state import IterationSummary
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.storage.run_folder import RunFolder
from tests.support.selecting import (
    AHEAD,
    OF_BEEF,
    OF_CAFE,
    PLAN,
    POOL,
    begun,
    entries,
    explore,
    group_of,
    ids,
    result,
)


def test_an_acknowledgement_says_which_seeds_were_chosen_because_of_it(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    first, second, third, fourth = selector.open(PLAN).units
    assert selector.accept([result(second)]) == [Ack()]
    assert ids(selector.wanted(4)) == [POOL[0], *POOL[2:]]
    (ack,) = selector.accept([result(first)])
    assert selector.accept([result(first)]) == [ack]  # the acknowledgement may have been lost
    regenerate = ack.chosen
    assert regenerate is not None
    assert regenerate.id == OF_BEEF
    assert (regenerate.stage, regenerate.revision, regenerate.indices) == ("regenerate", 4, (1, 0))
    assert ids(selector.wanted(4)) == [OF_BEEF, *POOL[2:]]
    assert selector.accept_groups(group_of(regenerate)) == [Ack()]
    assert selector.accept([result(first)]) == [Ack()]  # nothing is left to be done for its prompt
    nothing, last = selector.accept([result(third), result(fourth)])
    assert nothing == Ack()
    assert last.chosen is not None
    assert last.chosen.id == OF_CAFE
    assert ids(selector.wanted(4)) == [OF_CAFE]
    assert selector.accept_groups(group_of(last.chosen)) == [Ack()]
    assert selector.wanted(4) == ()
    assert selector.close(4).counts.groups == 2


def test_a_result_that_comes_again_with_other_bytes_is_counted_or_ends_a_strict_run(tmp_path: Path) -> None:
    for strict in (False, True):
        selector = Selector(tmp_path / str(strict), strict)
        unit, *left = selector.open(PLAN).units
        selector.accept([result(unit)])
        sentence = f"explorer-1 brought other bytes for {unit.describe()} than explorer-0"
        if strict:
            with pytest.raises(RunError, match=re.escape(sentence) + ", and fleet.strict is true"):
                selector.accept([result(unit, "explorer-1", shift=1.0)])
            continue
        assert selector.accept([result(unit, "explorer-1", shift=1.0)]) == [Ack(differs=sentence)]
        for ready in explore(selector, tuple(left)):
            made = group_of(ready)
            assert selector.record_group(made) is Outcome.ACCEPTED
            assert selector.record_group(replace(made, rewards=(0.9, 0.2))) is Outcome.VIOLATION
        summary = selector.close(4)
        assert summary.counts.violations == len(summary.violations) == 3
        assert summary.violations[0] == sentence
        assert summary.selections[0].top[0].index == 1  # as by the first result


def test_a_group_that_comes_again_is_acknowledged_as_one_that_does_not_count(tmp_path: Path) -> None:
    selector = begun(tmp_path)
    group = group_of(replace(PLAN.pool_units()[0], stage="regenerate", indices=(1, 0)))
    others = replace(group, rewards=(0.9, 0.2)), group_of(replace(PLAN.pool_units()[0], indices=(1, 0)), latent=7.0)
    assert selector.accept_groups(group, *others) == [Ack(repeats=True)] * 3
    assert selector._of(4).state.counts().violations == 2
    assert selector.stored(4, "beef")[0] == group.rewards


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
        assert ack.chosen is None
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
    assert [ack.chosen for ack in acks] == [
        each.chosen for each in [*one_by_one[:2], Ack(), *one_by_one[2:], one_by_one[1]]
    ]
    assert [bool(ack.refused) for ack in acks] == [False, False, True, False, False, False]
    assert "refused a result of explorer-0" in acks[2].refused
    groups = [group_of(ack.chosen) for ack in one_by_one if ack.chosen is not None]
    assert len(groups) == 2
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
    assert len(again.results) == 4


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
    assert sum(ack.chosen is not None for ack in acks) == 50
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
    with pytest.raises(RunError, match=r"iteration 3 is not open in the selector; open iterations: \[4\]"):
        selector.close(3)
    with pytest.raises(NonsenseError, match="regenerator-0 answered a unit of iteration 4, which is not open"):
        selector.record_group(group_of(replace(of_three[0], stage="regenerate")))
    selector.drop(3)  # nothing to do


def test_groups_are_of_the_current_revision_and_pools_of_the_one_before(tmp_path: Path) -> None:
    selector = Selector(tmp_path)
    units = selector.open(AHEAD).units
    (ack,) = selector.accept([result(replace(units[0], revision=4))])
    assert "revision 4; expected iteration 5, revision 3" in ack.refused
    led_to = explore(selector, units)
    selector.revise(4, "bb")
    assert [(unit.stage, unit.revision) for unit in led_to] == [("regenerate", 4)] * 2
    again = Selector(tmp_path)
    assert again.open(AHEAD).units == ()
    assert again.revise(4, "bb").units == led_to
