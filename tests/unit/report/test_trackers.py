"""W&B and trackio themselves, where they are installed: what they hold of a run that was resumed by another process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from solrl_ray.errors import UserError
from solrl_ray.report import trackers
from tests.support.processes import python

PROGRAM = """
import sys
from pathlib import Path
import torch
from solrl_ray.report import trackers
from tests.support import made_runs

name, folder, first, end = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
writer = trackers.opened(name, made_runs.config(), folder)
for number in range(first, end):
    writer.iteration(made_runs.iteration(number))
writer.evaluation(made_runs.evaluations()[2], [[torch.zeros(3, 8, 8)] * 2])
writer.close()
"""
READ = """
import json
from trackio.sqlite_storage import SQLiteStorage
runs = [record["name"] for record in SQLiteStorage.get_run_records("solrl")]
print(json.dumps({run: SQLiteStorage.get_logs("solrl", run) for run in runs}))
"""
needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("trackio", "wandb")
}


def test_a_run_keeps_its_id_and_another_one_has_another(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    first = trackers.run_id(one)
    assert len(first) == 8
    assert trackers.run_id(one) == first
    assert trackers.run_id(other) != first
    (one / trackers.FILE).write_text("[]")
    with pytest.raises(UserError, match=r"trackers\.json"):
        trackers.run_id(one)


@needs["trackio"]
def test_trackio_goes_on_with_a_resumed_run(tmp_path: Path) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    for first, end in ((0, 2), (1, 3)):  # the second iteration is done again
        python("-c", PROGRAM, "trackio", run, f"{first}", f"{end}", TRACKIO_DIR=str(store))
    found = json.loads(python("-c", READ, TRACKIO_DIR=str(store)))
    ((name, lines),) = found.items()
    assert name == f"small world-{trackers.run_id(run)}"
    rewards = [(line["step"], line["reward/train"]) for line in lines if "reward/train" in line]
    assert rewards == [(0, 0.3), (1, 0.31), (1, 0.31), (2, 0.32)]
    last = lines[-1]
    assert last["step"] == 3
    assert last["reward/heldout_ema"] == pytest.approx(29 / 60)
    assert last["heldout/ema"]["_type"] == "trackio.image"


@needs["wandb"]
def test_wandb_goes_on_with_a_resumed_run(tmp_path: Path) -> None:
    """Offline, W&B has a folder for each process, which it brings together by the run's id when they are synced."""
    run = tmp_path / "run"
    for first, end in ((0, 2), (1, 3)):
        python("-c", PROGRAM, "wandb", run, f"{first}", f"{end}", WANDB_MODE="offline")
    number = trackers.run_id(run)
    written = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert [path.name for path in written] == [f"run-{number}.wandb"] * 2
    for path in written:
        content = path.read_bytes()
        for name in ("updates", "reward/train", "reward/heldout_ema", "wall_seconds/total", "rank_fidelity/spearman"):
            assert name.encode() in content
    for pictures in (path.parent.glob("files/media/images/heldout/ema_*.png") for path in written):
        assert len(list(pictures)) == 1
