"""Pools of any model: a tier has its own number format, whatever the configuration has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rank_fidelity
from common import CONFIGS
from rank_fidelity import Bench

from solrl_ray.config.loading import load


def test_the_full_sample_is_float32_also_of_a_model_in_bfloat16(tmp_path: Path) -> None:
    made = {
        dtype: Bench(load([CONFIGS / "demo.yaml"], [f"model.dtype={dtype}"]), 1, 4, tmp_path, "cpu")
        for dtype in ("float32", "bfloat16")
    }
    made["bfloat16"]._embeddings = made["float32"]._embeddings  # texts are encoded once for all tiers
    full = made["float32"].pools("float32", 2)
    assert full.shape == (1, 4)
    assert np.array_equal(made["bfloat16"].pools("float32", 2), full)
    assert np.array_equal(made["float32"].pools("bf16", 2), made["bfloat16"].pools("bf16", 2))
    assert not np.array_equal(made["float32"].pools("bf16", 2), full)
    assert len(list(tmp_path.iterdir())) == 4  # nothing of another configuration is taken for its own


def test_kept_pools_are_those_of_the_same_seed_and_sampler(tmp_path: Path) -> None:
    def pools(*settings: str) -> np.ndarray:
        return Bench(load([CONFIGS / "demo.yaml"], list(settings)), 1, 4, tmp_path, "cpu").pools("float32", 2)

    first = pools("run.seed=1")
    kept = list(tmp_path.iterdir())
    assert np.array_equal(pools("run.seed=1", "run.name=other"), first)
    assert list(tmp_path.iterdir()) == kept  # found again
    assert not np.array_equal(pools("run.seed=2"), first)
    assert not np.array_equal(pools("run.seed=1", "rollout.sampler.kind=flow_sde"), first)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("given", [["some.yaml"], ["--set", "run.seed=2"]])
def test_another_configuration_needs_a_folder_of_its_own_for_its_result(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        rank_fidelity.main(given)
    assert ended.value.code == 2
    assert "error: CONFIG and --set need --out" in capsys.readouterr().err
