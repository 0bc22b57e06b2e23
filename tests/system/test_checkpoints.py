"""A run whose newest checkpoint is damaged goes back one, and copies of checkpoints are made on the way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from actors import commands
from solrl_ray.config.schema import Config
from tests.small import digests, folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_truncated_checkpoint_costs_one_iteration_and_no_byte(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "truncated", f"checkpoints.upload='{tmp_path / 'copies'}'")
    run = folder(config)
    shutil.copytree(folder(calm), run)
    (run / "summary.json").unlink()
    newest = run / "checkpoints/iteration-000003/optimizer.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) // 2])
    commands.train(config, live=False, resume=True)
    assert digests(config) == digests(calm)
    assert newest.read_bytes() == whole
    assert (run / "checkpoints/iteration-000003.damaged/optimizer.safetensors").stat().st_size == len(whole) // 2
    assert "the checkpoint after 3 updates is passed over" in capsys.readouterr().out
    copied = tmp_path / "copies/truncated/checkpoints/iteration-000003"
    assert (copied / "optimizer.safetensors").read_bytes() == whole
    assert sorted(path.name for path in copied.iterdir()) == sorted(path.name for path in newest.parent.iterdir())
