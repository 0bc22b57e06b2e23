"""Where a run goes on, and what it drops because it will be made again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.client import launch
from actors.client.launch import concluded
from solrl_ray.common.checked_json import with_checksum
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.report.summary import summarize, write_summary
from solrl_ray.storage.checkpoints import state_before
from solrl_ray.storage.resume import check_prompts, resume_point
from solrl_ray.storage.run_folder import RunFolder
from tests.support import made_runs
from tests.support.bad_disk import make_unreadable
from tests.support.made_checkpoints import small_state as state

NAMES = (
    "journal/iteration-{n:06d}.jsonl",
    "samples/iteration-{n:06d}/aa.safetensors",
    "evaluations/updates-{n:06d}-ema/aa-0.png",
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was killed inside iteration 4, with checkpoints after 3 and 4 updates."""
    run = RunFolder(tmp_path)
    for updates in (3, 4):
        state(updates).save(run.checkpoint(updates))
    run.append_metrics(made_runs.evaluation(0, "base", made_runs.BASE))
    for number in range(4):
        run.append_metrics(made_runs.iteration(number))
    run.append_metrics(made_runs.evaluation(4, "ema", made_runs.FINAL))
    for number in (3, 4):
        for name in NAMES:
            path = tmp_path / name.format(n=number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    (tmp_path / "journal" / "iteration-000005.jsonl.stale").write_text("x")
    (tmp_path / "journal" / "notes.txt").write_text("x")
    return run


def damage(folder: RunFolder, updates: int) -> None:
    (folder.checkpoint(updates) / "policy.safetensors").write_bytes(b"cut")


def present(folder: RunFolder, number: int) -> list[bool]:
    return [(folder.path / name.format(n=number)).exists() for name in NAMES]


def test_a_run_goes_on_inside_its_iteration_and_keeps_what_belongs_to_it(folder: RunFolder) -> None:
    point = resume_point(folder, iterations=4)
    assert (point.updates, point.state.updates) == (4, 4)
    assert [m.iteration for m in point.iterations] == [0, 1, 2, 3]
    assert [e.iteration for e in point.evaluations] == [0, 4]
    assert point.seconds == 4 * 10.0 + 2 * 1.5
    assert all(present(folder, 3) + present(folder, 4))


def test_what_lies_beyond_the_checkpoint_is_dropped(folder: RunFolder) -> None:
    damage(folder, 4)
    point = resume_point(folder, iterations=9)
    assert (point.updates, len(point.iterations), len(point.evaluations)) == (3, 3, 1)
    assert all(present(folder, 3))
    assert not any(present(folder, 4))
    assert not (folder.path / "journal" / "iteration-000005.jsonl.stale").exists()
    assert (folder.path / "journal" / "notes.txt").exists()
    assert [updates for updates, _ in folder.checkpoints()] == [3]
    assert (folder.path / "checkpoints" / "iteration-000004.damaged" / "state.json").exists()
    assert len(folder.read_metrics()) == 4
    (note,) = point.notes
    assert note.startswith("the checkpoint after 4 updates is skipped: ")
    assert "policy.safetensors is damaged" in note
    assert note.endswith("; using the one after 3")


@pytest.mark.parametrize(("ended_after", "goes"), [(4, True), (3, False), (None, False)])
def test_the_summary_of_a_run_that_goes_back_before_its_end_goes(
    folder: RunFolder, ended_after: int | None, goes: bool
) -> None:
    summary = folder.path / "summary.json"
    summary.write_text("damaged" if ended_after is None else json.dumps(with_checksum({"iterations": ended_after})))
    damage(folder, 4)
    resume_point(folder, iterations=9)
    assert summary.exists() != goes


def test_the_journal_of_what_was_explored_ahead_stays_and_nothing_else(folder: RunFolder) -> None:
    damage(folder, 4)
    assert resume_point(folder, iterations=9, staleness=1).updates == 3
    assert present(folder, 4) == [name.startswith("journal") for name in NAMES]
    assert not (folder.path / "journal" / "iteration-000005.jsonl.stale").exists()


def test_what_an_iteration_is_explored_with_is_the_state_before_its_own(folder: RunFolder) -> None:
    before = state_before(folder.checkpoints(), 4)
    assert before is not None
    assert before.updates == 3
    assert state_before([], 1) is None  # the very start needs none
    with pytest.raises(UserError, match=r"after 2 updates .* checkpoints\.keep .* 2"):
        state_before(folder.checkpoints(), 3)


def test_fewer_iterations_than_updates_are_refused_and_nothing_is_dropped(folder: RunFolder) -> None:
    damage(folder, 4)
    with pytest.raises(UserError, match=r"run\.iterations is 2, but .* 3 updates"):
        resume_point(folder, iterations=2)
    assert all(present(folder, 4))
    assert len(folder.read_metrics()) == 6


def test_missing_metrics_are_told_and_nothing_is_dropped(folder: RunFolder) -> None:
    damage(folder, 4)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(RunError, match=r"metrics\.jsonl .*\[0, 2\], .* 3 updates"):
        resume_point(folder, iterations=9)
    assert all(present(folder, 4))


def test_a_run_none_of_whose_checkpoints_can_be_read_is_refused(folder: RunFolder) -> None:
    damage(folder, 3)
    damage(folder, 4)
    with pytest.raises(UserError, match=str(folder.path)):
        resume_point(folder, iterations=9)


def test_a_new_run_begins_at_0(tmp_path: Path) -> None:
    point = resume_point(RunFolder(tmp_path), iterations=1)
    assert replace(point, iterations=[], evaluations=[]) == point
    assert (point.updates, point.state, point.seconds) == (0, None, 0)


@pytest.mark.parametrize("line", ["garbage", '{"event": "iteration"}'])
def test_a_damaged_line_of_the_metrics_is_named_and_nothing_is_dropped(folder: RunFolder, line: str) -> None:
    lines = folder.metrics.read_text().splitlines()
    folder.metrics.write_text("\n".join([lines[0], line, *lines[1:], ""]))
    damage(folder, 4)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2, "):
        resume_point(folder, iterations=9)
    assert all(present(folder, 4))


def test_a_run_that_has_all_it_was_to_make_is_not_worked_on_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(made_runs.write_run(tmp_path / "small world"))
    state(3).save(run.checkpoint(3))
    assert not concluded(run)  # its LoRA file is not there
    run.lora.mkdir()
    (run.lora / "pytorch_lora_weights.safetensors").touch()
    assert concluded(run)
    config = made_runs.config()
    config = config.model_copy(update={"run": config.run.model_copy(update={"root": str(tmp_path)})})
    summary = (run.path / "summary.json").read_bytes()
    assert launch.train(config, resume=True, address="127.0.0.1:1") == 0  # where nobody listens
    assert capsys.readouterr().out.startswith("all 3 iterations are done; set a larger run.iterations to continue\n")
    assert (run.path / "summary.json").read_bytes() == summary
    assert (run.path / "report.html").exists()
    damage(run, 3)
    state(2).save(run.checkpoint(2))
    assert not concluded(run)


def test_a_finished_run_whose_lora_has_changed_is_not_concluded_and_writes_it_again(tmp_path: Path) -> None:
    run = RunFolder(made_runs.write_run(tmp_path / "run"))
    state(3).save(run.checkpoint(3))
    run.lora.mkdir()
    file = run.lora / "pytorch_lora_weights.safetensors"
    file.write_bytes(b"weights")
    records = [made_runs.iteration(number) for number in range(3)]
    write_summary(run.path, summarize(made_runs.config(), records, made_runs.evaluations(), seconds=1.0))
    assert concluded(run)
    file.write_bytes(b"weightz")
    assert not concluded(run)


PROMPTS = "a red circle\na blue square\na green ring\n"


def reads(folder: RunFolder, train: str = PROMPTS, heldout: str = PROMPTS) -> Config:
    """The configuration of a run in `folder` whose prompt files, beside it, hold this; two prompts are evaluated."""
    files = {name: folder.path.parent / f"{name}.txt" for name in ("train", "heldout")}
    for file, content in zip(files.values(), (train, heldout), strict=True):
        file.write_text(content)
    values = made_runs.config().model_dump() | {"prompts": {name: str(file) for name, file in files.items()}}
    values["run"] |= {"root": str(folder.path.parent), "name": folder.path.name}
    values["evaluation"] |= {"prompts": 2}
    return Config.model_validate(values)


@pytest.mark.parametrize(
    ("train", "heldout", "problem"),
    [
        (PROMPTS + "a cat\n", PROMPTS, r"prompts\.train is '.*train\.txt', whose .* \(3 then, 4 now; text"),
        ("".join(reversed(PROMPTS.splitlines(True))), PROMPTS, r"prompts\.train is "),
        (PROMPTS, PROMPTS.replace("blue", "pink"), r"prompts\.heldout is '.*heldout\.txt', .* \(2 then, 2 now"),
    ],
)
def test_a_run_goes_on_with_no_other_prompts_than_it_began_with(
    tmp_path: Path, train: str, heldout: str, problem: str
) -> None:
    run = RunFolder(tmp_path / "run")
    config = reads(run)
    run.create(config, resume=False)
    run.lock.release()
    check_prompts(run, config)
    reads(run, train, heldout)
    with pytest.raises(UserError, match=problem):
        launch.train(config, resume=True, address="127.0.0.1:1")  # where nobody listens


def test_files_of_the_same_prompts_may_look_otherwise(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    check_prompts(run, reads(run))
    check_prompts(run, reads(run, PROMPTS.replace("\n", " \n\n"), PROMPTS + "nobody evaluates this one\n"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{bad", r"prompts\.json is not JSON: .*; remove it, if"),
        ("{}", r"prompts\.json does not contain .*; remove it, if"),
    ],
)
def test_a_damaged_note_of_the_prompts_is_named(tmp_path: Path, content: str, problem: str) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.prompts.write_text(content)
    with pytest.raises(UserError, match=problem):
        check_prompts(run, reads(run))


@pytest.mark.parametrize("name", ["policy.safetensors", "state.json"])
def test_a_checkpoint_that_the_disk_does_not_give_is_passed_over(folder: RunFolder, name: str) -> None:
    make_unreadable(folder.checkpoint(4) / name)
    point = resume_point(folder, iterations=9)
    assert point.updates == 3
    (note,) = point.notes
    assert note.startswith("the checkpoint after 4 updates is skipped: ")
    assert "Input/output error" in note
