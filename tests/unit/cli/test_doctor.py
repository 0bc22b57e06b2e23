"""`solrl doctor` tests the tiers that a machine has, says which it lacks, and fails when a self-test fails."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from solrl_ray.cli import main
from solrl_ray.cli.doctor import Finding, devices, examine
from solrl_ray.quantization import nvfp4
from tests.support.documents import ROOT

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")


def found(root: Path) -> dict[tuple[str, str], Finding]:
    return {(finding.part, finding.what): finding for finding in examine(root)}


@cpu_only
def test_a_cpu_has_the_emulation_and_lacks_the_rest_for_a_reason(tmp_path: Path) -> None:
    findings = found(tmp_path / "runs")
    assert findings["cpu", "nvfp4-emulated"].state == "ok"
    assert "17 of 17" in findings["cpu", "nvfp4-emulated"].detail
    assert findings["cpu", "fp8"] == Finding(
        "cpu", "fp8", "lacks", "fp8 needs a GPU of compute capability 8.9 or newer"
    )
    assert findings["cpu", "nvfp4"].state == "lacks"
    assert torch.__version__.startswith(findings["libraries", "torch"].detail)
    assert findings["storage", "runs"].detail.startswith(f"{tmp_path}/runs, ")
    assert not (tmp_path / "runs").exists()
    assert devices() == [torch.device("cpu")]


def test_runs_can_be_kept_in_folders_alone_that_take_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root, problem in ((tmp_path / "file", f"{tmp_path}/file is a file"), (Path("/proc/x"), "/proc takes no files")):
        storage = found(root)["storage", "runs"]
        assert (storage.state, storage.detail) == ("FAILS", f"{root}: {problem}")


@pytest.mark.parametrize("error", ["ENOLCK", "ENOSYS"])
def test_on_a_disk_without_file_locks_doctor_says_what_train_says(tmp_path: Path, error: str) -> None:
    """Seen by the program itself: its kernel answers `flock` with this error."""
    without = [sys.executable, str(ROOT / "tests/support/without_locks.py"), error, sys.executable, "-m", "solrl_ray"]
    root = f"run.root={tmp_path}"
    said = []
    for command in (["doctor", "--root", str(tmp_path)], ["train", "demo", "--set", root, "--dry-run"]):
        done = subprocess.run([*without, *command], capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode == 77:
            pytest.skip("this kernel takes no seccomp filter")
        said.append(" ".join((done.stdout + done.stderr).split()))
        assert done.returncode in (1, 2), said
        assert "Traceback" not in said[-1]
    why = f"{tmp_path} is on a disk without file locks ({os.strerror(getattr(errno, error))})"
    assert all(why in each for each in said), said
    assert list(tmp_path.iterdir()) == []


def test_a_failing_self_test_is_named_and_gives_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--root", str(tmp_path)]) == 0
    monkeypatch.setattr(nvfp4, "SIXTH", 0.16)
    assert main(["doctor", "--root", str(tmp_path)]) == 1
    assert "cpu        nvfp4-emulated       FAILS  known answer V" in capsys.readouterr().out
