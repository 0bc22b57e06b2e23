"""A learner rank whose peers are lost."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from actors.workers.learner_rank import LearnerRank
from solrl_ray.errors import PeerGone
from solrl_ray.learning.engine import free_port
from tests.support.small import small_config


def test_a_rank_that_is_aborted_while_it_joins_reports_the_loss_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    config = small_config(tmp_path, "run", "learner.world_size=2", "fleet.deadlines.collective=2")
    rank = LearnerRank(config, 0)
    rank._device = torch.device("cpu")
    threading.Timer(0.5, rank.abort).start()
    with pytest.raises(PeerGone, match=r"^learning on rank 0 failed: another rank of its group is lost$"):
        rank.join("localhost", free_port(), True)
