"""Driver, controller and encoder are killed in chosen states; resuming ends with the bytes of an undisturbed run.

Meanwhile the machine's clock jumps to and fro, as one whose time is set, and its disk takes as long for a checkpoint as
the test wants.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from solrl_ray.config.schema import Config
from solrl_ray.report.trace import read_spans
from tests.small import digests, folder, small_config

PATIENCE = 240.0
MACHINE = """
import itertools, os, sys, time

def rename(source, target):
    while os.path.exists(os.path.join(os.path.dirname(__file__), "held-" + os.path.basename(target))):
        time.sleep(0.01)
    renamed(source, target)

if any(part.endswith("default_worker.py") for part in sys.orig_argv):  # an actor's process
    real, jumps = time.time, itertools.cycle((0.0, 7200.0, -86400.0))
    time.time = lambda: real() + next(jumps)
    renamed, os.rename = os.rename, rename
"""
"""Python imports it into each process that finds it as ``sitecustomize``. What the test holds gets its name later."""


def solrl(*arguments: str, machine: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, (str(machine), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "solrl_ray", "train", *arguments, "--no-live"],
        env=os.environ | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(what: str, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.005)


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    def told() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return reached()

    wait_for("the wanted state", told)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def journaled(run: Path, iteration: int) -> int:
    return lines(run / f"journal/iteration-{iteration:06d}.jsonl")


def measured(run: Path) -> str:
    path = run / "metrics.jsonl"
    return path.read_text() if path.exists() else ""


def iterations(run: Path) -> list[dict[str, Any]]:
    return [record for record in map(json.loads, measured(run).splitlines()) if record["event"] == "iteration"]


def pids(role: str, machine: Path) -> list[int]:
    """Processes of this test that play a role: by Ray's title of theirs, and their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = str(machine).encode() in process.joinpath("environ").read_bytes()
            if mine and process.joinpath("cmdline").read_bytes().startswith(f"ray::{role}".encode()):
                found.append(int(process.name))
        except OSError:  # not ours, or gone
            continue
    return found


class Death(NamedTuple):
    who: str
    state: str
    reached: Callable[[Path], Callable[[], bool]]
    """Is given the run folder when the driver starts; says whether the state has come."""
    sentence: str = ""
    """How the driver ends, unless it is what is killed."""
    unsaved: str = ""
    """A checkpoint that the disk does not finish meanwhile."""


def more_of(iteration: int) -> Callable[[Path], Callable[[], bool]]:
    """A state: there is more in an iteration's journal than when the driver was started, and a result at least."""

    def watch(run: Path) -> Callable[[], bool]:
        before = max(1, journaled(run, iteration))
        return lambda: journaled(run, iteration) > before

    return watch


DEATHS = (
    Death("driver", "some candidates of iteration 0 are in", more_of(0)),
    Death(
        "Controller",
        "some candidates of iteration 1 are in",
        more_of(1),
        r"error: the controller is gone: .*; go on with --resume",
    ),
    Death(
        "Encoder", "more of iteration 1 is in", more_of(1), r"error: encoding 3 prompts failed: its worker is gone: "
    ),
    Death(
        "driver",
        "iteration 2 is begun, while the checkpoint of iteration 1 is written",
        lambda run: lambda: journaled(run, 2) >= 1 and (run / "checkpoints/.iteration-000002.partial").exists(),
        unsaved="iteration-000002",
    ),
    Death(
        "driver",
        "iteration 2 is measured, its checkpoint is not there",
        lambda run: lambda: '"iteration": 2, "revision": 2' in measured(run),
        unsaved="iteration-000003",
    ),
)


def kill(death: Death, process: subprocess.Popen[str], run: Path, machine: Path) -> None:
    """SIGKILL who is to die once the run folder shows the wanted state, and wait for the driver's end."""
    if death.unsaved:
        machine.joinpath(f"held-{death.unsaved}").touch()
    wait_until(process, death.reached(run))
    if death.who == "driver":
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
        if death.unsaved:
            wait_for("the end of the controller", lambda: not pids("Controller", machine))
            assert not (run / "checkpoints" / death.unsaved).exists()
            machine.joinpath(f"held-{death.unsaved}").unlink()
        return
    [victim] = pids(death.who, machine)
    os.kill(victim, signal.SIGKILL)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, said
    assert re.search(death.sentence, said), said


@pytest.mark.timeout(900)
@pytest.mark.faults
def test_a_run_that_is_ended_again_and_again_resumes_to_the_same_bytes(calm: Config, tmp_path: Path) -> None:
    config = small_config(tmp_path, "killed")
    run = folder(config)
    path = tmp_path / "config.yaml"
    path.write_text(folder(calm).joinpath("config.yaml").read_text())
    machine = tmp_path / "machine"
    machine.mkdir()
    machine.joinpath("sitecustomize.py").write_text(MACHINE)
    start = [str(path), "--set", f"run.root='{tmp_path}'", "--set", "run.name=killed"]
    for death in DEATHS:
        kill(death, solrl(*start, machine=machine), run, machine)
        assert not (run / "summary.json").exists(), death.state
        start = ["--resume", str(run)]
    last = solrl(*start, machine=machine)
    said, _ = last.communicate(timeout=PATIENCE)
    assert last.returncode == 0, said
    assert digests(config) == digests(calm)
    # The clock did jump, and what was measured or waited for did not.
    stamps = [span.started for span in read_spans(run)]
    assert max(stamps) - min(stamps) > 86_400.0
    assert all(0.0 <= span.seconds < PATIENCE for span in read_spans(run))
    assert all(0.0 <= value < PATIENCE for record in iterations(run) for value in record["seconds"].values())
