"""Benchmarks whose figures are of previews that are all finished say so, whatever the shipped parts do."""

from __future__ import annotations

import argparse
from pathlib import Path

import many_gpus
import memory_limit
import pytest
import rollout

from solrl_ray.config.loading import load
from solrl_ray.config.strategies import pool_sampling

COMMON = {"model": "flux", "work": Path("work"), "prompts": 1, "iterations": 3, "set": [], "layers": None}


def test_a_published_rollout_is_measured_with_all_its_previews() -> None:
    given = argparse.Namespace(**COMMON, tier="fp8", preview_decoder=False, all_blocks=False)
    pool = pool_sampling(rollout.settings(given))
    assert (pool.pool, pool.unit, pool.pruning, pool.micro_batch) == (96, 24, None, 24)


@pytest.mark.parametrize("limit", [24, 48, 76])
def test_an_iteration_on_a_smaller_card_is_measured_with_all_its_previews(limit: float) -> None:
    given = memory_limit.run(argparse.Namespace(**COMMON), memory_limit.part(limit), ["learner.micro_batch=2"])
    config = load(many_gpus.files(given), many_gpus.settings(given))
    pool = pool_sampling(config)
    assert (pool.pruning, pool.unit, config.learner.micro_batch) == (None, pool.micro_batch, 2)
