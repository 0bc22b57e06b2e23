"""Objectives in the real system: each on another family; trajectories travel, are kept, and change with no fleet.

`tests/unit/objectives/test_objectives.py` trains pairs of objective and family in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.client import launch
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.storage.run_folder import RunFolder
from tests.support import tiny, tiny_qwen
from tests.support.small import CONFIGS, SIZES, digests, folder, small_config, summary

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
    iterations = [record for record in run.read_metrics() if record["event"] == "iteration"]
    assert [record["first_ratio_deviation"] for record in iterations] == [0.0, 0.0]
    assert all(record["passes"] == record["expected_passes"] > 0 for record in iterations)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "family", "build", "own"),
    [
        ("awm", "sd3", tiny.build_sd3, "objective.timesteps=2"),
        ("flow_grpo", "sana", tiny.build_sana, "rollout.explore.steps=3"),
        ("flow_grpo_fast", "flux2_klein", tiny.build_flux2_klein, "rollout.sampler.window={size: 2, range: [0, 3]}"),
        ("flow_grpo", "qwen_image", tiny_qwen.build_qwen_image, "rollout.explore.steps=3"),
        ("awm", "z_image", tiny_qwen.build_z_image, "objective.timesteps=2"),
    ],
)
def test_each_method_trains_another_family(
    local_ray: None, tmp_path: Path, method: str, family: str, build: Callable[[Path], Path], own: str
) -> None:
    files = [CONFIGS / "demo.yaml", CONFIGS / "methods" / f"{method}.yaml"]
    sizes = [size for size in SIZES if not size.startswith("objective")]
    where = (f"run.root='{tmp_path}'", f"run.name={method}", "run.iterations=2")
    rollout = ("rollout.explore.steps=4", "rollout.explore.precision=float32", "rollout.solver=euler")
    reward = "rewards=[{kind: 'tests.system.rewards:brightness'}]"
    made = load(files, [*sizes, *where, *rollout, reward, "learner.updates=1", own])
    resolution = 32 if family == "sana" else tiny.RESOLUTION
    path = build(tmp_path / "pipeline")
    model = tiny.model_config(path, family=family, resolution=resolution, schedule=made.model.schedule)
    config = made.model_copy(update={"model": model})
    launch.train(config, live=False)
    done = [record for record in RunFolder(folder(config)).read_metrics() if record["event"] == "iteration"]
    assert [record["first_ratio_deviation"] for record in done] == [0.0, 0.0]
    assert all(record["gradient_norm"] > 0 and record["passes"] == record["expected_passes"] > 0 for record in done)
    assert summary(config)["lora_digest"]
