"""The driver is killed in chosen states; resuming ends with the bytes of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from solrl_ray.config.schema import Config
from tests.small import digests, folder, small_config

PATIENCE = 120.0


def solrl(*arguments: str, wait: bool = True) -> subprocess.Popen[str]:
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "solrl_ray", "train", *arguments, "--no-live"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if wait:
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
    return process


def kill_when(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """SIGKILL the driver once the run folder shows the wanted state."""
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the wanted state never came"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


STATES: dict[str, Callable[[Path], bool]] = {
    "some candidates are in": lambda run: lines(run / "journal/iteration-000001.jsonl") >= 3,
    "a group is regenerated": lambda run: any((run / "samples/iteration-000001").glob("*.safetensors")),
    "an iteration is measured, its checkpoint is not there": lambda run: (
        b'"iteration": 1, "revision": 1' in (run / "metrics.jsonl").read_bytes()
        if (run / "metrics.jsonl").exists()
        else False
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_a_killed_driver_resumes_to_the_same_bytes(calm: Config, tmp_path: Path, state: str) -> None:
    config = small_config(tmp_path, "killed")
    run = folder(config)
    path = tmp_path / "config.yaml"
    path.write_text(folder(calm).joinpath("config.yaml").read_text())
    process = solrl(str(path), "--set", f"run.root='{tmp_path}'", "--set", "run.name=killed", wait=False)
    kill_when(process, lambda: STATES[state](run))
    assert not (run / "summary.json").exists()
    solrl("--resume", str(run))
    assert digests(config) == digests(calm)
