"""What a user sees of a run whose workers start: from another process, within seconds, and with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.cluster.progress_notes import noted
from actors.fleet.actor_factory import ActorClasses
from actors.workers.explorer import Explorer
from actors.workers.learner_rank import LearnerRank
from solrl_ray.cli import main
from solrl_ray.common.progress_note import progress_note
from solrl_ray.config.loading import to_yaml
from tests.support import forkserver
from tests.support.live import begun, wait_for
from tests.support.patience import patience, wait_until
from tests.support.small import small_config

pytestmark = pytest.mark.usefixtures("local_ray")

SEEN_SECONDS = 2.0


def at_gate(root: Path, name: str) -> None:
    (root / f"{name} is here").write_text(str(time.time()))
    wait_until(f"{name} may go", (root / f"{name} may go").exists)


class SlowLearner(LearnerRank):
    @noted
    def start(self) -> str:
        with progress_note("loading transformer, 3 of 12 shards"):
            at_gate(Path(self._config.run.root), "learner-0")
        return super().start()


class SlowExplorer(Explorer):
    def _build(self, device: Any) -> Any:
        with progress_note("quantising the transformer"):
            at_gate(Path(self._config.run.root), "explorer-0")
        return super()._build(device)


def test_who_starts_says_what_it_does_and_the_status_of_this_machines_run_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starting, _ = begun(small_config(tmp_path, "starting"), ActorClasses(learner=SlowLearner, explorer=SlowExplorer))
    for name, words in (
        ("learner-0", "loading transformer, 3 of 12 shards"),
        ("explorer-0", "quantising the transformer"),
    ):
        wait_until(f"{name} at its gate", (tmp_path / f"{name} is here").exists)
        wait_for(words, starting, lambda p, name=name, words=words: p.notes.get(name) == words, SEEN_SECONDS)
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "starting workers: waiting for the learners" in shown
    assert "loading transformer, 3 of 12 shards" in shown
    assert "quantising the transformer" in shown
    for name in ("learner-0", "explorer-0"):
        (tmp_path / f"{name} may go").touch()
    wait_for(
        "an explorer that has started and says no more what it does",
        starting,
        lambda p: p.workers.get("explorer-0", "starting") != "starting" and "explorer-0" not in p.notes,
    )
    ray.kill(starting)


def test_a_start_that_is_told_to_end_says_so_and_how_the_run_goes_on(forks: str, tmp_path: Path) -> None:
    config = small_config(tmp_path, "cut")
    file, lock = tmp_path / "cut.yaml", tmp_path / "cut" / "lock"
    file.write_text(to_yaml(config))
    command = forkserver.solrl(forks, "train", str(file), "--no-live")
    environment = os.environ | forkserver.environment(forks)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        # The driver has it, until its controller claims the folder.
        wait_until("the lock of the run folder", lambda: lock.exists() and lock.read_text())
        holder = lock.read_text()
        assert driver.stdout is not None
        assert any("starting workers" in line for line in driver.stdout)
        os.kill(int(holder.split()[1]), signal.SIGTERM)
        rest = driver.stdout.read()
        assert driver.wait(patience()) == 130
    assert "interrupted by SIGTERM while it was starting, before anything was trained; " in rest
    assert f"go on with: solrl train --resume {tmp_path / 'cut'}\n" in rest
