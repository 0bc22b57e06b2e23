"""Samples that are trained on several times, on a real Ray: the same bytes from a run that was cut off and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.client import launch
from solrl_ray.config.checks import check
from solrl_ray.report.data import read_run
from tests.support.small import digests, folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")

OPTIONS = (
    "run.iterations=2",
    "learner={epochs: 2, updates: 3}",
    "objective={clip_range: 0.001, kl: 0, shared_noise: true, step_range: [0, 3]}",
)


def test_a_run_of_two_epochs_resumed_with_more_explorers_ends_with_the_bytes_of_a_straight_one(tmp_path: Path) -> None:
    straight = small_config(tmp_path, "straight", *OPTIONS)
    check(straight)
    launch.train(straight, live=False)
    launch.train(small_config(tmp_path, "resumed", *OPTIONS, "run.iterations=1"), live=False)
    resumed = small_config(tmp_path, "resumed", *OPTIONS, "fleet.explorers.count=2")
    launch.train(resumed, live=False, resume=True)
    assert digests(resumed) == digests(straight)
    # The share that comes to the bound: only in a group's second time and after other groups' steps.
    shares = [record.clip_fraction for record in read_run(folder(straight)).iterations]
    assert all(share is not None and 0 < share < 1 for share in shares)
