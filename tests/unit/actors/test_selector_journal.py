"""What a selector that is restarted has of its journal and of stored groups, and what is made again."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.workers.selector import Ack, Selector
from solrl_ray.errors import RunError
from solrl_ray.records import Pruning
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
    on_disk,
    result,
)


def test_an_iteration_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    begun(tmp_path)
    again = Selector(tmp_path)
    opened = again.open(PLAN)
    assert [group.prompt_id for group in opened.groups] == ["beef"]
    assert opened.groups[0].indices == (1, 0)
    assert len(opened.results) == 3
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
    assert f"line 3 of {path.name} is damaged; it and the {after} after it" in opened.message
    assert "iteration 4" in opened.message
    assert len(opened.results) == 1
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
        assert len(opened.results) == journal[: ends[held - 1] if held else 0].count(b'"kind":"explore"')
        assert opened.groups == ()  # none of their files is there
        wanted = opened.units
        while wanted:
            groups = [group_of(unit) for unit in wanted if unit.stage == "regenerate"]
            acks = selector.accept([result(unit) for unit in wanted if unit.stage == "explore"])
            assert selector.accept_groups(*groups) == [Ack()] * len(groups)
            wanted = tuple(ack.chosen for ack in acks if ack.chosen is not None)
        assert selector.wanted(4) == ()
        assert selector.close(4) == expected
        again = Selector(folder).open(PLAN)
        assert (again.units, len(again.results), len(again.groups)) == ((), 4, 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole.replace(b"[1, 0]", b"[3, 0]"),
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    ],
)
def test_a_stored_group_that_is_not_whole_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    begun(tmp_path)
    path = next(tmp_path.rglob("beef.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    again = Selector(tmp_path)
    opened = again.open(PLAN)
    assert (opened.groups, len(opened.results)) == ((), 3)
    assert ids(opened.units) == [OF_BEEF, POOL[3]]
    on_disk(again, group_of(opened.units[0]))
    assert path.read_bytes() == whole


def test_a_stored_group_that_is_not_whole_when_it_is_asked_for_is_made_again(tmp_path: Path) -> None:
    selector = begun(tmp_path)
    rewards, group = selector.stored(4, "beef")
    assert group is not None
    assert rewards == group.rewards == (0.9, 0.1)
    path = next(tmp_path.rglob("beef.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    for _ in range(2):
        assert selector.stored(4, "beef") == ((), None)
    units = selector.wanted(4)
    assert ids(units) == [OF_BEEF, POOL[3]]
    assert on_disk(selector, group_of(units[0])) is Outcome.RESTORED
    assert path.read_bytes() == whole
    assert selector.stored(4, "beef")[0] == (0.9, 0.1)
    assert on_disk(selector, group_of(units[0])) is Outcome.DUPLICATE
    assert entries(selector).count("regenerate") == 1


def test_a_lost_group_that_comes_back_with_other_bytes_ends_the_run(tmp_path: Path) -> None:
    selector = begun(tmp_path)
    next(tmp_path.rglob("beef.safetensors")).unlink()
    selector.stored(4, "beef")
    unit, _ = selector.wanted(4)
    with pytest.raises(RunError, match="whose samples are lost"):
        selector.accept_groups(group_of(unit, rewards=(0.9, 0.2)))


def test_a_journal_of_another_policy_is_set_aside_and_the_iteration_done_anew(tmp_path: Path) -> None:
    begun(tmp_path)
    opened = Selector(tmp_path).open(replace(PLAN, policy_digest="bb"))
    assert (opened.groups, opened.results) == ((), ())
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
    assert opened.results == ()
    assert opened.message == (
        "iteration 4 is done again: iteration-000004.jsonl.stale was made by workers of other score classes "
        "(another device, thread count or library), or with other prompts"
    )
    assert Selector(tmp_path).open(replace(PLAN, score_class="c/b")).message == ""


@pytest.mark.parametrize("changes", [{"prompt_ids": ("beef", "f00d")}, {"keep": 4}, {"pool": 6, "policy_digest": "bb"}])
def test_a_journal_of_another_plan_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    begun(tmp_path)
    with pytest.raises(RunError, match="was begun with another plan"):
        Selector(tmp_path).open(replace(PLAN, **changes))
    assert not list((tmp_path / "journal").glob("*.stale"))


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
    assert (len(opened.results), opened.groups, opened.units, same.wanted(4)) == (4, (), (), ())
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


def test_the_journal_keeps_early_scores_and_who_was_dropped_and_brings_them_back(tmp_path: Path) -> None:
    plan = replace(PLAN, unit=4, prune=Pruning(after=2, keep=2))
    selector = Selector(tmp_path)
    beef, _ = selector.open(plan).units
    early = float32(0.1, 0.3, 0.2, 0.5)  # 0 and 3 go on
    rewards = (*float32(0.7), *early[1:3], *float32(0.6))
    (ack,) = selector.accept([replace(result(beef), rewards=rewards, early=early)])
    assert ack.chosen is not None
    assert ack.chosen.id == "regenerate/4/beef/0-3"
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
