"""A driver is killed in chosen states; resuming ends with the bytes of an undisturbed run.

Meanwhile the machine's clock jumps to and fro, as one whose time is set, and its disk stops where
the test wants. The runs start a local Ray, so what that tells their workers of OpenMP is looked at, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from ray._private.utils import publish_error_to_driver
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from actors.client import launch
from actors.cluster import ray_messages
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.report.live import LiveView
from tests.support.forkserver import solrl
from tests.support.patience import patience, wait_until
from tests.support.small import digests, folder, small_config
from tests.support.spans import read_spans

MACHINE = """
import itertools, os, sys, time

def allowed(name):
    try:
        with open(os.path.join(os.path.dirname(__file__), name)) as file:
            return int(file.read())
    except OSError:
        return float("inf")

def fsync(descriptor):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    while (lines := allowed(os.path.basename(path))) < float("inf"):
        with open(path, "rb") as file:
            if file.read().count(b"\\n") <= lines:
                break
        time.sleep(0.01)
    synced(descriptor)

def rename(source, target):
    while allowed("renamed-" + os.path.basename(target)) == 0:
        time.sleep(0.01)
    renamed(source, target)

if any(part.endswith("__main__.py") for part in sys.orig_argv):
    with open(os.path.join(os.path.dirname(__file__), "driver"), "w") as note:
        note.write(str(os.getpid()))
if any(part.endswith("default_worker.py") for part in sys.orig_argv):  # an actor's process
    with open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.pid"), "w") as note:
        note.write(os.environ.get("OMP_WAIT_POLICY", "none"))
    real, jumps = time.time, itertools.cycle((0.0, 7200.0, -86400.0))
    time.time = lambda: real() + next(jumps)
    synced, os.fsync = os.fsync, fsync
    renamed, os.rename = os.rename, rename
"""
"""Python imports it into each process that finds it as ``sitecustomize``.

A file beside it says how many lines the file of its name may have before the disk takes no more of it, and 0 in
``renamed-<name>`` that the file or folder of that name does not get its name.
"""


def train(forks: str, *arguments: str, machine: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, (str(machine), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        solrl(forks, "train", *arguments, "--no-live"),
        env=os.environ | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def journal_of(iteration: int) -> str:
    return f"iteration-{iteration:06d}.jsonl"


def journaled(run: Path, iteration: int) -> int:
    return lines(run / "journal" / journal_of(iteration))


def iterations(run: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == "iteration"]


def controllers(machine: Path) -> list[int]:
    """Processes of this test that are one, by Ray's title of theirs."""
    found = []
    for pid in (int(note.stem) for note in machine.glob("*.pid")):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # gone
            continue
        if title.startswith(b"ray::Controller"):
            found.append(pid)
    return found


def wait_policies(machine: Path) -> set[str]:
    """How OpenMP's threads wait in the processes of this test; they are forgotten."""
    notes = list(machine.glob("*.pid"))
    policies = {note.read_text() for note in notes}
    for note in notes:
        note.unlink()
    return policies


class Death(NamedTuple):
    journal: int | None = None
    """An iteration: its journal has more lines than when the run was started, and the disk does not take the last."""
    unsaved: str = ""
    """A checkpoint that is written, but the disk does not finish it."""

    def hold(self, run: Path, machine: Path) -> Callable[[], bool]:
        """Have the disk stop where the state is reached; returns whether it is."""
        before = 0
        if self.journal is not None:
            before = max(1, journaled(run, self.journal))
            (machine / journal_of(self.journal)).write_text(str(before))
        if self.unsaved:
            (machine / f"renamed-{self.unsaved}").write_text("0")

        def reached() -> bool:
            enough = self.journal is None or journaled(run, self.journal) > before
            return enough and (not self.unsaved or (run / f"checkpoints/.{self.unsaved}.partial").exists())

        return reached


DEATHS = (
    Death(journal=1, unsaved="iteration-000001"),  # 0 is learned from and does not count
    Death(unsaved="iteration-000003"),
)


def kill(death: Death, forks: str, start: list[str], run: Path, machine: Path) -> None:
    """Start or resume, SIGKILL the driver once the state is reached, and wait for its end and its controller's."""
    reached = death.hold(run, machine)
    process = train(forks, *start, machine=machine)

    def goes_on() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return True

    wait_until(f"{death}", lambda: goes_on() and reached())
    assert len(controllers(machine)) == 1
    os.kill(int((machine / "driver").read_text()), signal.SIGKILL)
    process.wait(patience())
    wait_until("the end of the controller", lambda: not controllers(machine))
    assert not (run / "checkpoints" / (death.unsaved or "iteration-000001")).exists()
    for note in machine.glob("*iteration-*"):
        note.unlink()


@pytest.mark.usefixtures("forked_workers")
def test_a_run_that_is_ended_again_and_again_resumes_to_the_same_bytes(
    calm: Config, forks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    config = small_config(tmp_path, "killed")
    run = folder(config)
    path = tmp_path / "config.yaml"
    path.write_text(folder(calm).joinpath("config.yaml").read_text())
    machine = tmp_path / "machine"
    machine.mkdir()
    machine.joinpath("sitecustomize.py").write_text(MACHINE)
    start = [str(path), "--set", f"run.root='{tmp_path}'", "--set", "run.name=killed"]
    for death in DEATHS:
        kill(death, forks, start, run, machine)
        assert not (run / "summary.json").exists(), death
        start = ["--resume", str(run)]
    assert wait_policies(machine) == {"PASSIVE"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # a user's own is kept
    last = train(forks, *start, machine=machine)
    said, _ = last.communicate(timeout=patience(240.0))
    assert last.returncode == 0, said
    assert wait_policies(machine) == {"ACTIVE"}
    assert digests(config) == digests(calm)
    assert [record["iteration"] for record in iterations(run)] == [0, 1, 2]
    # The clock did jump, and what was measured or waited for did not.
    stamps = [span.started for span in read_spans(run)]
    assert max(stamps) - min(stamps) > 86_400.0
    assert all(0.0 <= span.seconds < 3600.0 for span in read_spans(run))
    assert all(0.0 <= value < 3600.0 for record in iterations(run) for value in record["seconds"].values())


@pytest.mark.usefixtures("local_ray")
def test_rays_messages_are_in_a_file_that_one_sentence_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump, file = "the raylet died\n    state dump of actor 5a5a\n    stack trace", tmp_path / "ray.log"
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    with ray_messages.kept_in(file):
        for number in range(3):
            publish_error_to_driver("raylet_died", f"{number}: {dump}", gcs_client=gcs)
            wait_until(
                "the message", lambda number=number: file.exists() and f"{number}: the raylet" in file.read_text()
            )
    said = capsys.readouterr()
    assert str(file) in said.out
    assert len((said.out + said.err).splitlines()) == 1
    assert file.read_text().count("stack trace") == 3


class Deaf:
    """A controller that neither ends nor says how it is."""

    def run(self) -> None:
        time.sleep(3600.0)

    def progress(self, since: int) -> None:
        time.sleep(3600.0)


@pytest.mark.usefixtures("local_ray")
def test_a_driver_ends_with_a_sentence_when_its_controller_does_not_answer(tmp_path: Path) -> None:
    config = small_config(tmp_path, "deaf", "fleet.deadlines.start=0.5")
    controller = ray.remote(Deaf).options(num_cpus=0, max_concurrency=4).remote()
    said = "^the controller did not answer 3 requests for progress; go on with --resume$"
    with pytest.raises(RunError, match=said):
        launch.follow(controller, LiveView(plain=True), config, again="go on with --resume")
    ray.kill(controller)
