"""Objectives in the real system: trajectories travel, are kept, and change with no fleet.

`tests/unit/models/test_whole_runs.py` trains every pair of method and family in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.client import launch
from solrl_ray.config.schema import Config
from solrl_ray.report.data import read_run
from solrl_ray.storage.run_folder import RunFolder
from tests.support.small import digests, folder, small_config

DANCE = (
    "run.iterations=2",
    "objective.kind=dance_grpo",
    "objective.timestep_fraction=0.6",
    "rollout.sampler={kind: dance_sde, eta: 0.3}",
)


@pytest.fixture(scope="module")
def danced(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = small_config(tmp_path_factory.mktemp("dance"), "one", *DANCE)
    launch.train(config, live=False)
    return config


@pytest.mark.slow
def test_a_trajectory_is_kept_as_it_was_learned_from(danced: Config) -> None:
    run = RunFolder(folder(danced))
    iterations = read_run(run.path).iterations
    assert [record.first_ratio_deviation for record in iterations] == [0.0, 0.0]
    assert all(record.passes == record.expected_passes > 0 for record in iterations)
    samples = sorted((run.path / "samples").rglob("*.safetensors"))
    assert samples
    for path in samples:
        group = run.load_group(int(path.parent.name.split("-")[1]), path.stem)
        assert group.trajectory is not None
        # 4 steps, of which the last is not trained; the first state is the noise that all candidates share.
        assert group.trajectory.states.shape[:2] == (4, 4)
        assert (group.trajectory.states[:, 0] == group.trajectory.states[:1, 0]).all()


@pytest.mark.slow
def test_two_explorers_and_regenerators_change_no_byte(danced: Config, tmp_path: Path) -> None:
    other = small_config(tmp_path, "two", *DANCE, "fleet.explorers.count=2", "fleet.regenerators.count=2")
    launch.train(other, live=False)
    assert digests(other) == digests(danced)
