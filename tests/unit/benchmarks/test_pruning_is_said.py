"""Benchmarks whose figures are of previews that are all finished say so, whatever the shipped parts do."""

from __future__ import annotations

import argparse
from pathlib import Path

import full_iteration
import memory_limit
import objectives
import overlap
import pytest
import rollout
import scaling

from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, pool_sampling
from solrl_ray.records import Pruning

CONFIGS = Path(__file__).parents[3] / "configs"
FLUX = [CONFIGS / "methods/sol_rl.yaml", CONFIGS / "models/flux1_dev.yaml"]
COMMON = {"work": Path("work"), "tier": "fp8", "prompts": 1, "iterations": 3, "set": []}


def of_full_iteration(*settings: str) -> Config:
    given = argparse.Namespace(**COMMON | {"model": "flux", "name": "flux", "set": list(settings)})
    return load(FLUX, full_iteration.settings(given))


def of_overlap() -> Config:
    return load(FLUX, overlap.settings("colocated/0", argparse.Namespace(**COMMON)))


def of_rollout() -> Config:
    given = argparse.Namespace(**COMMON, model="flux", preview=24, preview_decoder=False, all_blocks=False)
    return rollout.settings(given)


def of_scaling() -> Config:
    return scaling.flux(8, 8, 8)


@pytest.mark.parametrize("configured", [of_full_iteration, of_overlap, of_rollout, of_scaling])
def test_a_published_rollout_is_measured_with_all_its_previews(configured: object) -> None:
    pool = pool_sampling(configured())  # type: ignore[operator]
    assert (pool.pool, pool.unit, pool.pruning, pool.micro_batch) == (96, 24, None, 24)


def test_a_whole_iteration_can_be_measured_with_pruned_previews() -> None:
    pool = pool_sampling(of_full_iteration("rollout.preview.prune={after: 2, keep: 36}"))
    assert (pool.unit, pool.pruning, pool.micro_batch) == (96, Pruning(after=2, keep=36), 12)


@pytest.mark.parametrize("limit", [24, 48, 76])
def test_an_iteration_on_a_smaller_card_is_measured_with_all_its_previews(limit: float) -> None:
    given = argparse.Namespace(**COMMON, model="flux", name="flux")
    pool = pool_sampling(load([*FLUX, memory_limit.part(limit)], memory_limit.settings(given)))
    assert (pool.pruning, pool.unit) == (None, pool.micro_batch)


@pytest.mark.parametrize("method", objectives.METHODS)
def test_the_methods_are_compared_with_all_previews(method: str) -> None:
    given = argparse.Namespace(root=Path("runs"), iterations=2, gpu=False, set=[])
    config = objectives.job(method, given).config
    assert not is_one_stage(config)
    assert (pool_sampling(config).pruning, pool_sampling(config).unit) == (None, 24)
