"""Everybody is killed or stopped in chosen states of a run on one GPU; it ends with the bytes of an undisturbed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from tests.chaos.test_workers import (
    DEATHS,
    SAID,
    MortalExplorer,
    MortalLearner,
    MortalRegenerator,
    MortalSelector,
    rewards,
)
from tests.support.small import digests, small_config, summary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("usual_workers"),
]

ALL_ON_ONE = (
    "run.deterministic=true",
    "compile.enabled=false",
    "compile.learner=false",
    "fleet.explorers={count: 2, num_gpus: 0.2}",
    "fleet.regenerators={num_gpus: 0.2}",
    "fleet.learners={num_gpus: 0.4}",
    "evaluation.every=1",
)


@pytest.mark.timeout(900)
def test_a_run_on_a_gpu_in_which_everybody_dies_ends_with_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = small_config(tmp_path, "calm", *ALL_ON_ONE)
    launch.train(calm, live=False)
    losses = ("fleet.max_replacements=20", "fleet.deadlines.explore=20")
    config = small_config(tmp_path, "killed", *ALL_ON_ONE, *losses)
    roles = ActorClasses(
        explorer=MortalExplorer, regenerator=MortalRegenerator, selector=MortalSelector, learner=MortalLearner
    )
    launch.train(config, live=False, classes=roles)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} >= DEATHS
    assert digests(config) == digests(calm)
    assert rewards(config) == rewards(calm)
    assert summary(config)["requeued_units"] >= 4
    said = capsys.readouterr().out
    assert [sentence for sentence in SAID if not re.search(sentence, said)] == []
