"""Whole runs with a GPU: explorers of two kinds of devices, and the fallback ladder from FP8 to bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.client import launch
from solrl_ray.config.schema import Config
from solrl_ray.quantization import capability
from solrl_ray.report.data import read_run
from tests.support.small import digests, folder, small_config
from tests.system.test_other_explorers import brought

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("usual_workers"),
    pytest.mark.timeout(900),  # a test has up to three runs, whose workers each load CUDA
]


GPU_AND_CPU = (
    "run.deterministic=true",
    "compile.enabled=false",
    "fleet.explorers={{count: {count}, num_gpus: {share}}}",
    "fleet.regenerators={{count: {count}, num_gpus: {share}}}",
    "fleet.other_explorers=[{{name: other, count: {count}, prompts: 1, threads: 1}}]",
)


ON_ONE_GPU = (
    "run.deterministic=true",
    "compile={{enabled: false, learner: false}}",
    "fleet.explorers={{count: {count}, num_gpus: {share}}}",
    "fleet.regenerators={{count: 1, num_gpus: 0.3}}",
    "fleet.learners={{threads: 1, num_gpus: 0.3}}",
)


def on_one_gpu(root: Path, name: str, *settings: str, explorers: int = 1) -> Config:
    """A small run whose workers share a GPU, after its end."""
    shared = [setting.format(count=explorers, share=0.3 / explorers) for setting in ON_ONE_GPU]
    config = small_config(root, name, *shared, *settings)
    launch.train(config, live=False)
    return config


def test_what_resting_workers_do_with_their_weights_changes_no_byte(tmp_path: Path) -> None:
    ways = ("keep", "lay_down", "one_at_a_time")
    ended = {way: digests(on_one_gpu(tmp_path, way, f"fleet.sharing={way}")) for way in ways}
    assert ended["lay_down"] == ended["keep"]
    assert ended["one_at_a_time"] == ended["keep"]


def test_pruned_previews_rank_the_same_with_one_explorer_and_with_two(tmp_path: Path) -> None:
    pruned = ("rollout.preview={unit: 8, prune: {after: 1, keep: 6}}", "fleet.sharing=keep")
    runs = {n: on_one_gpu(tmp_path, f"pruned-{n}", *pruned, explorers=n) for n in (1, 2)}
    assert digests(runs[2]) == digests(runs[1])
    assert sum(record.dropped for record in read_run(folder(runs[1])).iterations) == 3 * 3 * 2


def test_explorers_on_a_gpu_and_on_cpus_rank_the_same_however_many_they_are(tmp_path: Path) -> None:
    runs = {}
    for count, share in ((1, 0.4), (2, 0.2)):
        settings = [setting.format(count=count, share=share) for setting in GPU_AND_CPU]
        runs[count] = small_config(tmp_path, f"kinds-{count}", *settings)
        launch.train(runs[count], live=False)
    classes = {(kind, score_class) for _, kind, score_class in brought(runs[1])}
    assert len(classes) == len({score_class for _, score_class in classes}) == 2
    assert sorted(brought(runs[2])) == sorted(brought(runs[1]))
    assert digests(runs[2]) == digests(runs[1])


@pytest.mark.skipif(
    not torch.cuda.is_available() or bool(capability.lacks("fp8", torch.device("cuda", 0))), reason="no card with FP8"
)
def test_previews_in_fp8_that_rank_badly_are_drawn_in_bfloat16_from_the_next_iteration_on(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        "fallback",
        "model.dtype=bfloat16",
        "rollout.explore={steps: 2, precision: fp8}",
        "fidelity={floor: 0.999, patience: 1, fallback: [{precision: bf16}]}",
        "fleet.explorers={num_gpus: 0.4}",
        "fleet.regenerators={num_gpus: 0.4}",
    )
    launch.train(config, live=False)
    drawn = [(r.fallback_level, r.preview_precision) for r in read_run(folder(config)).iterations]
    assert drawn == [(0, "fp8"), (1, "bf16"), (1, "bf16")]
    attested = json.loads((folder(config) / "attestations.json").read_text())
    explorers = [a for a in attested if a["worker"].startswith("explorer")]
    assert [(a["worker"], a["tier"]) for a in explorers] == [("explorer-0", "fp8"), ("explorer-0.1", "bf16")]
    assert all("compiled" in a["checks"] for a in explorers)
