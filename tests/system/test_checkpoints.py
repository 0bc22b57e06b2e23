"""A run whose newest checkpoint is damaged goes back one, and copies of checkpoints are made on the way."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers.learner_rank import LearnerRank
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.state import LearnerState
from tests.support.patience import patience
from tests.support.small import digests, folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_truncated_checkpoint_costs_one_iteration_and_no_byte(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "truncated", f"checkpoints.upload='{tmp_path / 'copies'}'")
    run = folder(config)
    shutil.copytree(folder(calm), run)
    (run / "summary.json").unlink()
    newest = run / "checkpoints/iteration-000003/optimizer.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) // 2])
    launch.train(config, live=False, resume=True)
    assert digests(config) == digests(calm)
    assert newest.read_bytes() == whole
    assert (run / "checkpoints/iteration-000003.damaged/optimizer.safetensors").stat().st_size == len(whole) // 2
    assert "the checkpoint after 3 updates is skipped" in capsys.readouterr().out
    for name in ("metrics.jsonl", "summary.json", "report.html"):
        assert (tmp_path / "copies/truncated" / name).read_bytes() == (run / name).read_bytes()
    copied = tmp_path / "copies/truncated/checkpoints/iteration-000003"
    assert (copied / "optimizer.safetensors").read_bytes() == whole
    assert sorted(path.name for path in copied.iterdir()) == sorted(path.name for path in newest.parent.iterdir())
    # As if it had been cut off before the copies: what has nothing left to make is copied when it is resumed.
    shutil.rmtree(tmp_path / "copies/truncated")
    launch.train(config, live=False, resume=True)
    assert (tmp_path / "copies/truncated/summary.json").read_bytes() == (run / "summary.json").read_bytes()
    assert (copied / "optimizer.safetensors").read_bytes() == whole


class OnADiskThatHangs(LearnerState):
    def save(self, folder: Path) -> None:
        threading.Event().wait()


class HandsThemOut(LearnerRank):
    def _put(self, state: LearnerState) -> Any:
        parts = {name: getattr(state, name) for name in LearnerState.__dataclass_fields__}
        return super()._put(OnADiskThatHangs(**parts))


def test_a_checkpoint_that_a_disk_never_takes_ends_the_run_by_name(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, "stuck", "run.iterations=1", "rollout.prompts=1", f"fleet.deadlines.checkpoint={patience(2.0)}"
    )
    named = r"^the checkpoint after 1 updates in .*stuck \(fleet\.deadlines\.checkpoint\) passed its deadline"
    with pytest.raises(RunError, match=named):
        launch.train(config, live=False, classes=ActorClasses(learner=HandsThemOut))
