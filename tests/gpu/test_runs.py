"""Whole runs with a GPU: explorers of two kinds of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.client import launch
from solrl_ray.config.schema import Config
from solrl_ray.quantization import capability
from solrl_ray.report.data import read_run
from tests.support.small import digests, folder, small_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("usual_workers"),
    pytest.mark.timeout(900),  # a test has up to three runs, whose workers each load CUDA
]


UNCOMPILED = ("run.deterministic=true", "compile={enabled: false, learner: false}")
WHOLE = "{count: 1, num_gpus: 1}"
EACH_A_CARD = (
    *UNCOMPILED,
    f"fleet={{explorers: {WHOLE}, regenerators: {WHOLE}, learners: {{threads: 1, num_gpus: 1}}}}",
)
ONE_CARD = (*EACH_A_CARD, "fleet.placement=colocated")
IN_FP8 = ("model.dtype=bfloat16", "rollout.explore={steps: 2, precision: fp8}")

has_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(capability.lacks("fp8", torch.device("cuda", 0))), reason="no card with FP8"
)


def trained(root: Path, name: str, *settings: str) -> Config:
    """A small run, after its end."""
    config = small_config(root, name, *settings)
    launch.train(config, live=False)
    return config


def test_pruned_previews_rank_the_same_with_one_explorer_and_with_two(tmp_path: Path) -> None:
    pruned = (*UNCOMPILED, "rollout.preview={unit: 8, prune: {after: 1, keep: 6}}", "fleet.regenerators.num_gpus=0.4")
    runs = {
        count: trained(tmp_path, f"pruned-{count}", *pruned, f"fleet.explorers={{count: {count}, num_gpus: 0.3}}")
        for count in (1, 2)
    }
    assert digests(runs[2]) == digests(runs[1])
    assert sum(record.dropped for record in read_run(folder(runs[1])).iterations) == 3 * 3 * 2
