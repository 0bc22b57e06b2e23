"""What a user sees of a run whose workers start: from another process, within seconds, and with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.client.controller_actor import ControllerActor
from actors.client.launch import located
from actors.cluster.names import CONTROLLER, namespace
from actors.cluster.progress_notes import noted
from actors.fleet.actor_factory import ActorClasses, on_this_node
from actors.workers.explorer import Explorer
from actors.workers.learner_rank import LearnerRank
from solrl_ray.cli import main
from solrl_ray.common.doing import doing
from solrl_ray.config.loading import to_yaml
from solrl_ray.metrics.records import Progress
from solrl_ray.storage.run_folder import RunFolder
from tests.support import forkserver
from tests.support.small import small_config

pytestmark = pytest.mark.usefixtures("local_ray")

PATIENCE = 120.0
SEEN_SECONDS = 2.0


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.01)


def at_gate(root: Path, name: str) -> None:
    (root / f"{name} is here").write_text(str(time.time()))
    wait_for(root / f"{name} may go")


class SlowLearner(LearnerRank):
    @noted
    def start(self) -> str:
        with doing("loading transformer, 3 of 12 shards"):
            at_gate(Path(self._config.run.root), "learner-0")
        return super().start()


class SlowExplorer(Explorer):
    def _build(self, device: Any) -> Any:
        with doing("quantising the transformer"):
            at_gate(Path(self._config.run.root), "explorer-0")
        return super()._build(device)


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Any]:
    """The controller of a run in the folder ``starting`` whose workers wait at gates while they start."""
    config = small_config(tmp_path, "starting")
    run = RunFolder.of(config)
    run.create(config, resume=False)
    run.lock.release()
    made: Any = on_this_node(ControllerActor, CONTROLLER, namespace(run.path))
    handle = made.remote(located(config), run.path, ActorClasses(learner=SlowLearner, explorer=SlowExplorer))
    handle.run.remote()
    yield handle
    ray.kill(handle)


def notes(controller: Any, seconds: float, name: str, words: str | None) -> Progress:
    """The first snapshot in which that is what the actor of that name does, which is to come within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        progress: Progress = ray.get(controller.progress.remote(), timeout=PATIENCE)
        if progress.notes.get(name) == words:
            return progress
        assert time.monotonic() < deadline, progress
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_who_starts_says_what_it_does_and_the_status_of_this_machines_run_shows_it(
    starting: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (
        ("learner-0", "loading transformer, 3 of 12 shards"),
        ("explorer-0", "quantising the transformer"),
    ):
        wait_for(tmp_path / f"{name} is here")
        notes(starting, SEEN_SECONDS, name, words)
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "starting workers: waiting for the learners" in shown
    assert "loading transformer, 3 of 12 shards" in shown
    assert "quantising the transformer" in shown
    for name in ("learner-0", "explorer-0"):
        (tmp_path / f"{name} may go").touch()
    progress = notes(starting, PATIENCE, "explorer-0", None)
    while "explorer-0" not in progress.workers or progress.workers["explorer-0"] == "starting":
        progress = notes(starting, PATIENCE, "explorer-0", None)


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_start_that_is_told_to_end_says_so_and_how_the_run_goes_on(forks: str, tmp_path: Path) -> None:
    config = small_config(tmp_path, "cut")
    file, lock = tmp_path / "cut.yaml", tmp_path / "cut" / "lock"
    file.write_text(to_yaml(config))
    command = forkserver.solrl(forks, "train", str(file), "--no-live")
    environment = os.environ | forkserver.environment(forks)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        wait_for(lock)
        while not (holder := lock.read_text()):  # the driver, until its controller claims the folder
            time.sleep(0.01)
        assert driver.stdout is not None
        assert any("starting workers" in line for line in driver.stdout)
        os.kill(int(holder.split()[1]), signal.SIGTERM)
        rest = driver.stdout.read()
        assert driver.wait(PATIENCE) == 130
    assert "interrupted while it was starting, before anything was trained; " in rest
    assert f"go on with: solrl train --resume {tmp_path / 'cut'}\n" in rest
