"""Everybody is killed or stopped in chosen states of a run on one GPU; it ends with the bytes of an undisturbed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from actors.client import launch
from tests.chaos.test_workers import DEATHS, rewards
from tests.gpu.test_runs import ONE_CARD
from tests.support.small import digests, small_config
from tests.system.test_cards import ALL_MORTAL, SAID_OF_A_CARD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("usual_workers"),
]


def test_a_run_on_a_gpu_in_which_everybody_dies_ends_with_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = small_config(tmp_path, "calm", *ONE_CARD, "evaluation.every=1")
    launch.train(calm, live=False)
    losses = ("evaluation.every=1", "fleet.max_replacements=20", "fleet.deadlines.explore=20")
    config = small_config(tmp_path, "killed", *ONE_CARD, *losses)
    launch.train(config, live=False, classes=ALL_MORTAL)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} >= DEATHS
    assert digests(config) == digests(calm)
    assert rewards(config) == rewards(calm)
    said = capsys.readouterr().out
    assert [sentence for sentence in SAID_OF_A_CARD if not re.search(sentence, said)] == []
