"""The newest families in the real system: in every rollout strategy, with quantised explorers where it has such."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from actors.client import launch
from solrl_ray.storage.run_folder import RunFolder
from tests.support import tiny, tiny_qwen
from tests.support.small import folder, small_config, summary

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]

BUILDERS = {"qwen_image": tiny_qwen.build_qwen_image, "z_image": tiny_qwen.build_z_image}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: BUILDERS[family](tmp_path_factory.mktemp(family) / "pipeline"))


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        ("two_stage", ()),
        ("direct", ("rollout.pool=4", "rollout.regenerate.micro_batch=4")),
        ("scaled", ()),
        ("quantized", ("rollout.accept_quantized_training=true",)),
    ],
)
def test_every_strategy_trains_it(
    family: str, strategy: str, own: tuple[str, ...], folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    sizes = ("run.iterations=2", f"rollout.strategy={strategy}", *own)
    reward = "rewards=[{kind: 'tests.system.rewards:brightness'}]"
    made = small_config(tmp_path, strategy, *sizes, reward)
    model = tiny.model_config(folder_of(family), family=family, schedule=made.model.schedule)
    config = made.model_copy(update={"model": model})
    launch.train(config, live=False)
    done = [record for record in RunFolder(folder(config)).read_metrics() if record["event"] == "iteration"]
    assert len(done) == 2
    assert all(record["gradient_norm"] > 0 and record["passes"] == record["expected_passes"] > 0 for record in done)
    assert all(record["differing_results"] == 0 for record in done)
    assert summary(config)["lora_digest"]
