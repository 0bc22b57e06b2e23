"""Own rewards are tried on what they will score, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.cli import preflight
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from tests.support.documents import ROOT

OWN = """
def moves(video, prompts):
    if video.shape[2] < 9:
        raise ValueError(f"{video.shape[2]} frames are too few")
    return (video[:, :, 8] - video[:, :, 0]).abs().mean(dim=(1, 2, 3))
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of videos of 9 frames, whose previews have the first latent frame, which is one picture."""
    (tmp_path / "mine.py").write_text(OWN)
    model = "model={family: wan, resolution: 16, frames: 9}"
    reward = f"rewards=[{{kind: '{tmp_path}/mine.py:moves'}}]"
    return load([ROOT / "configs" / "demo.yaml"], [model, reward, "rollout.preview.latent_frames=[0]"])


def test_an_evaluation_tries_its_own_rewards_on_whole_videos_alone(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    preflight.functions(preflight.Run(config, evaluates=True))
    assert "for two videos of noise" in capsys.readouterr().out


def test_a_run_also_tries_them_on_its_previews(config: Config) -> None:
    with pytest.raises(UserError, match="1 frames are too few"):
        preflight.functions(preflight.Run(config))
