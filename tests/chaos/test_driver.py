"""The driver is killed in chosen states; resuming ends with the bytes of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

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


def measured(run: Path) -> str:
    path = run / "metrics.jsonl"
    return path.read_text() if path.exists() else ""


STATES: dict[str, Callable[[Path], bool]] = {
    "some candidates of iteration 0 are in": lambda run: lines(run / "journal/iteration-000000.jsonl") >= 3,
    "a group of iteration 1 is regenerated": lambda run: any((run / "samples/iteration-000001").glob("*.safetensors")),
    "iteration 2 is measured, its checkpoint is not there": lambda run: (
        '"iteration": 2, "revision": 2' in measured(run)
    ),
}


def test_a_driver_killed_again_and_again_resumes_to_the_same_bytes(calm: Config, tmp_path: Path) -> None:
    config = small_config(tmp_path, "killed")
    run = folder(config)
    path = tmp_path / "config.yaml"
    path.write_text(folder(calm).joinpath("config.yaml").read_text())
    start = [str(path), "--set", f"run.root='{tmp_path}'", "--set", "run.name=killed"]
    for state, reached in STATES.items():
        assert not reached(run), f"{state!r} came before it could be waited for"
        kill_when(solrl(*start, wait=False), partial(reached, run))
        assert not (run / "summary.json").exists()
        start = ["--resume", str(run)]
    solrl(*start)
    assert digests(config) == digests(calm)
