"""Which run folders the command line begins in, goes on in and refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from solrl_ray.storage import run_folder
from solrl_ray.storage.run_folder import RunFolder
from tests.support.command_line import begin, printed, refusal, solrl


def test_a_run_is_resumed_by_its_folder_or_by_its_configuration(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path / "runs" / "small", config_file, "run.seed=9")
    assert "seed 9" in printed(capsys, "train", "--dry-run", "--resume", tmp_path / "runs" / "small")
    assert "seed 9" in printed(capsys, "train", config_file, "--set", "run.seed=9", "--resume", "--dry-run")
    assert refusal(capsys, "train", config_file, "--resume", "--dry-run").startswith(
        "run.seed is 42 (default), but the run in"
    )


def test_a_run_folder_may_be_moved_to_any_folder_and_its_fleet_changed(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path / "runs" / "small", config_file)
    path = tmp_path / "it's here: \U0001f5bf" / 'the "small" one'
    path.parent.mkdir()
    (tmp_path / "runs" / "small").rename(path)
    more = ["--set", "fleet.explorers.count=5", "--set", "run.iterations=30"]
    text = " ".join(printed(capsys, "train", "--dry-run", "--resume", path, *more).split())
    assert f"{path.name} · 30 iterations" in text
    assert "5 explorers × 1 thread" in text


def refused_folder(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a run whose folder is refused prints after its arithmetic."""
    assert solrl("train", *arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message.removeprefix("error: ").strip()


def test_a_run_into_a_folder_in_use_is_refused_with_and_without_resume(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "RESUME_PATIENCE", 0.3)
    path = tmp_path / "runs" / "small"
    begin(path, config_file)
    before = (path / "config.yaml").read_bytes()
    holder = RunFolder(path)
    holder.lock.acquire(seconds=0)
    in_use = f"the run folder {path} is in use by process {os.getpid()} on {os.uname().nodename}"
    in_use += "; wait for its end, or stop it"
    assert refused_folder(capsys, config_file) == in_use
    assert refused_folder(capsys, "--resume", path, "--set", "run.iterations=9") == in_use
    assert solrl("train", "--resume", path, "--dry-run") == 2
    told = f"note: another process uses {path}; waiting up to 0.3 s for it to end\n"  # and no plan
    assert capsys.readouterr() == (told, f"error: {in_use}\n")
    assert (path / "config.yaml").read_bytes() == before
    holder.lock.release()


def test_a_resumed_run_is_named_as_when_it_began_unless_one_stands_elsewhere(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, shorter = tmp_path / "runs" / "small", ("--set", "run.iterations=1")
    begin(path, config_file, "run.root=runs")
    (path / "checkpoints" / "iteration-000002").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for named in ("runs/small", path):
        said = refused_folder(capsys, "--resume", named, *shorter)
        assert said.startswith("run.iterations is 1, but runs/small has made 2 updates already")
    monkeypatch.chdir(path)
    for named in (".", "../small", path):
        said = refused_folder(capsys, "--resume", named, *shorter)
        assert " has made 2 updates already" in said
        assert Path(said.split(" but ")[1].split(" has made ")[0]).resolve() == path


def test_continue_begins_a_run_and_resumes_one_that_was_begun(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert solrl("train", config_file, "--continue", "--dry-run") == 0
    begin(tmp_path / "runs" / "small", config_file, "run.seed=9")
    assert solrl("train", config_file, "--continue", "--dry-run") == 0  # nothing was journaled: it is no run yet
    (tmp_path / "runs" / "small" / "journal").mkdir()
    (tmp_path / "runs" / "small" / "journal" / "iteration-000000.jsonl").touch()
    capsys.readouterr()
    assert refusal(capsys, "train", config_file, "--dry-run").startswith("run.name is 'small', but")
    assert refusal(capsys, "train", config_file, "--continue", "--dry-run").startswith(
        "run.seed is 42 (default), but the"
    )


def test_a_dry_run_refuses_a_folder_that_cannot_be_made(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "taken").write_text("a file")
    for name, values in (("n" * 300, "255 bytes"), ("é" * 130, "255 bytes"), ("taken", "taken is a file")):
        assert solrl("train", config_file, "--set", f"run.name={name}", "--dry-run") == 2
        said = capsys.readouterr().err.removeprefix("error: ")
        assert all(word in said for word in values.split())
        assert said.startswith(("run.name (--set) begins with ", "run.root is "))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]
