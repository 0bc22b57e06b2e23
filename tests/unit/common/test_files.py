"""Reading and writing within a time, where the disk may hang. A FIFO does: who opens it waits for the other end."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from actors.client import launch
from solrl_ray.cli import doctor
from solrl_ray.common import files
from solrl_ray.errors import RunError
from solrl_ray.policy.saving import FILE as LORA_FILE
from solrl_ray.report import data
from solrl_ray.storage import continuation, folder_lock
from solrl_ray.storage.run_folder import RunFolder
from tests.support.command_line import solrl
from tests.support.made_runs import write_run
from tests.support.small import small_config


def test_status_ends_with_a_sentence_where_the_disk_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "hangs"
    write_run(run)
    monkeypatch.setattr(data, "read_attestations", lambda path: threading.Event().wait())
    monkeypatch.setattr(data, "READ_SECONDS", 0.1)
    assert solrl("status", run) == 1
    assert capsys.readouterr().err == f"error: reading {run} passed its deadline of 0.1 s: the disk does not answer\n"


def test_who_looks_for_a_live_run_ends_with_a_sentence_where_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "lock")
    monkeypatch.setattr(folder_lock, "READ_SECONDS", 0.1)
    with pytest.raises(RunError, match=r"^checking the lock .*lock passed its deadline of 0\.1 s"):
        assert RunFolder(tmp_path).lock.held


def test_a_stored_configuration_that_a_disk_does_not_give_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "format").write_text(f"{continuation.FORMAT}\n")
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr(continuation, "READ_SECONDS", 0.1)
    monkeypatch.setattr(continuation, "load", lambda files: threading.Event().wait())
    with pytest.raises(RunError, match=r"^reading .*config\.yaml passed its deadline of 0\.1 s"):
        continuation.stored(tmp_path)


def test_a_run_folder_whose_disk_hangs_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "hangs", "fleet.deadlines.checkpoint=2")
    folder = RunFolder.of(config)
    write_run(folder.path)
    folder.lora.mkdir()
    (folder.lora / LORA_FILE).touch()
    started: list[RunFolder] = []
    monkeypatch.setattr(launch, "_work", lambda config, folder, *rest, **named: started.append(folder))
    monkeypatch.setattr(launch, "RESUME_PATIENCE", 0.0)
    launch.train(config, resume=True, live=False)
    assert len(started) == 1
    monkeypatch.setattr(data, "read_attestations", lambda path: threading.Event().wait())
    named = r"^opening the run folder .*hangs \(fleet\.deadlines\.checkpoint\) passed its deadline of 2 s"
    with pytest.raises(RunError, match=named):
        launch.train(config, resume=True, live=False)
    assert len(started) == 1


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that syncs files and refuses folders."""
    files.tell_once.cache_clear()
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)


@pytest.mark.usefixtures("share")
def test_a_disk_that_refuses_to_sync_folders_keeps_files_and_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.replace_folder(tmp_path / "a" / "b", {"c": b"kept"})
    files.replace_file(tmp_path / "d", b"too")
    assert (tmp_path / "a" / "b" / "c").read_bytes() + (tmp_path / "d").read_bytes() == b"kepttoo"
    assert capsys.readouterr().err.count("does not sync file names") == 1
    (finding,) = (found for found in doctor._storage(tmp_path) if found.what == "runs")
    assert finding.state == "lacks"
    assert finding.detail.endswith("may continue from an earlier checkpoint")


def test_any_other_error_of_a_folder_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error") as refused:
        files.sync_folder(tmp_path)
    assert refused.value.filename == str(tmp_path)
