"""The fallback ladder on real runs: what each fallback level explores with is what the oracle explores with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from actors.client import launch
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import at_fallback_level
from solrl_ray.report.data import read_run
from solrl_ray.storage.run_folder import RunFolder
from tests import oracle
from tests.support.small import digests, folder, small_config

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]

LOW = ("rollout.explore.steps=2", "fidelity={floor: 0.95, patience: 1, fallback: [{steps: 3}, {precision: float32}]}")
"""Two steps in four bits rank the chosen seeds of three prompts at a Spearman of 0.87, three steps at 0.80."""


def drawn(config: Config) -> list[tuple[int, int | None, str | None]]:
    return [(r.fallback_level, r.preview_steps, r.preview_precision) for r in read_run(folder(config)).iterations]


def of_the_oracle(config: Config, levels: Sequence[int]) -> tuple[str, str]:
    threads = torch.get_num_threads()
    result = oracle.run(config, iterations=len(levels), levels=[at_fallback_level(config, level) for level in levels])
    torch.set_num_threads(threads)
    return result.selection_digest, result.lora_digest


def test_each_low_iteration_takes_a_level_also_across_a_resume(tmp_path: Path) -> None:
    begun = small_config(tmp_path, "fallback", *LOW, "run.iterations=2")
    launch.train(begun, live=False)
    config = small_config(tmp_path, "fallback", *LOW)
    launch.train(config, live=False, resume=True)
    assert drawn(config) == [(0, 2, "nvfp4-emulated"), (1, 3, "nvfp4-emulated"), (2, 3, "float32")]
    header = RunFolder(folder(config)).journal(1).entries()[0]["plan"]
    assert (header["fallback_level"], header["steps"]) == (1, 3)
    assert digests(config) == of_the_oracle(config, [0, 1, 2])
