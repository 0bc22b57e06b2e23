"""The run on the GPUs of one host: who is where, what is refused, and what is computed from what was measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import many_gpus
import pytest
from results_page import BLOCKS

from solrl_ray.config.card_memory import gpus
from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import UserError
from solrl_ray.records import Pruning


def configured(**changes: Any) -> Config:
    given = {"model": "flux", "gpus": 8, "placement": "colocated", "staleness": 0, "zero": 1, "prompts": 48}
    given |= {"iterations": 2, "kill": False, "layers": None, "set": [], "work": Path("work")}
    arguments = argparse.Namespace(**given | changes)
    config = load(many_gpus.files(arguments), many_gpus.settings(arguments))
    check(config)
    return config


def test_each_gpu_hosts_one_worker_of_each_kind_that_take_turns() -> None:
    config = configured()
    fleet = config.fleet
    assert (fleet.explorers.count, fleet.regenerators.count, config.learner.world_size) == (8, 8, 8)
    assert gpus(config) == 8


@pytest.mark.parametrize("count", [2, 4, 8])
def test_of_a_split_host_half_of_the_gpus_learn(count: int) -> None:
    config = configured(placement="split", staleness=1, gpus=count)
    assert config.learner.world_size == config.fleet.explorers.count == count // 2
    assert gpus(config) == count


def test_a_prompt_is_the_published_one_with_pruned_previews() -> None:
    config = configured()
    pool = pool_sampling(config)
    assert (pool.pool, config.rollout.keep, pool.pruning) == (96, 24, Pruning(after=2, keep=36))


def test_who_takes_turns_explores_nothing_ahead() -> None:
    with pytest.raises(UserError, match="max_staleness"):
        configured(staleness=1)


def row(**changes: Any) -> dict[str, Any]:
    seconds = dict.fromkeys(("ahead", "explore", "regenerate", "learn", "checkpoint", "publish"), 5.0)
    seconds |= {"total": 50.0, "update": 4.5}
    made = {"model": "flux", "device": "NVIDIA H200", "gpus": 2, "placement": "colocated", "staleness": 0, "zero": 1}
    made |= {"prompts": 12, "layers": None, "kill": False, "set": [], "seconds": seconds, "seconds_48_prompts": 180.0}
    made |= {"planned": {"seconds": 45.0, "peak_gb": [77.1]}, "busy": [0.91, 0.9], "peak_gb": [70.2, 71.8]}
    made |= {"idle_explorers": 0, "all_reduce": 0.0006}
    return made | {"digests": {"selection": "0123456789", "lora": "abcdefghij"}} | changes


def test_the_page_compares_whole_iterations_with_their_plans_and_few_layers_with_one_another(tmp_path: Path) -> None:
    assert "many_gpus.py" in BLOCKS["gpus"](tmp_path)
    one_gpu = row(gpus=1, prompts=6)
    del one_gpu["all_reduce"]
    few = row(layers=6, placement="split", kill=True, set=["run.deterministic=true"])
    split = row(placement="split", seconds_48_prompts=None, zero=2)
    (tmp_path / "many_gpus.json").write_text(json.dumps([row(), one_gpu, split, few]))
    *_, one, two, apart, _, reduction = BLOCKS["gpus"](tmp_path).splitlines()
    assert "NCCL needs 0.6 ms" in reduction
    assert one.startswith("| FLUX.1-dev, 512 px | H200 | 1 | colocated | 6 |")
    assert two.startswith("| FLUX.1-dev, 512 px | H200 | 2 | colocated | 12 |")
    assert apart.startswith("| FLUX.1-dev, 512 px | H200 | 2 | split, ZeRO-2 | 12 |")
    assert apart.endswith("| 91% / 90% | |")
    assert "| **50.0** | 45.0 (-10%) | 72 | 77 | 91% / 90% | 180 |" in two
    *_, last = BLOCKS["placements"](tmp_path).splitlines()
    assert last.startswith("| split, staleness 0, ZeRO-1, an explorer killed, `run.deterministic` | 6 | 12 | 5.0 |")
    assert last.endswith("| 01234567 | abcdefgh |")


def test_an_iteration_with_an_idle_explorer_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "many_gpus.json").write_text(json.dumps([row(idle_explorers=1)]))
    assert BLOCKS["gpus"](tmp_path).startswith("Not measured yet")


def test_a_plan_of_the_published_iteration_needs_no_gpu_and_replaces_an_older_one(tmp_path: Path) -> None:
    for _ in range(2):
        many_gpus.main(["sana", "--plan", "h100-80", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "many_gpus_planned.json").read_text())
    assert [(one["gpus"], one["prompts"]) for one in rows] == [(1, 48), (2, 48), (4, 48), (8, 48)]
    seconds = [one["seconds"] for one in rows]
    assert seconds[0] / 8 < seconds[3] < seconds[2] / 1.9


def test_a_plan_of_something_else_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for other in (["--layers", "6"], ["--kill"], ["--gpus", "2"]):
        with pytest.raises(SystemExit):
            many_gpus.main(["sana", "--plan", "h100-80", *other])
        assert "leave out --layers, --kill, --gpus" in capsys.readouterr().err
