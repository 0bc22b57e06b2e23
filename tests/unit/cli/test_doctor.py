"""`solrl doctor` tests the tiers that a machine has, says which it lacks, and fails when a self-test fails."""

from pathlib import Path

import pytest
import torch

from solrl_ray.cli import main
from solrl_ray.cli.doctor import Finding, devices, examine
from solrl_ray.quantization import nvfp4

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")


def found(root: Path) -> dict[tuple[str, str], Finding]:
    return {(finding.part, finding.what): finding for finding in examine(root)}


@cpu_only
def test_a_cpu_has_the_emulation_and_lacks_the_rest_for_a_reason(tmp_path: Path) -> None:
    findings = found(tmp_path / "runs")
    assert findings["cpu", "nvfp4-emulated"].state == "ok"
    assert "17 of 17" in findings["cpu", "nvfp4-emulated"].detail
    assert findings["cpu", "fp8"] == Finding(
        "cpu", "fp8", "lacks", "fp8 needs a card of compute capability 8.9 or newer"
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


def test_a_failing_self_test_is_named_and_gives_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--root", str(tmp_path)]) == 0
    monkeypatch.setattr(nvfp4, "SIXTH", 0.16)
    assert main(["doctor", "--root", str(tmp_path)]) == 1
    assert "cpu        nvfp4-emulated       FAILS  known answer V" in capsys.readouterr().out
