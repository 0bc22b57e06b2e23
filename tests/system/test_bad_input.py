"""Bad input that shows only when workers compute: one sentence, a status that is not 0, nothing trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.cli import main
from solrl_ray.config.loading import to_yaml
from tests.small import folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.mark.parametrize(
    ("reward", "problem"),
    [("nan", "tests.system.rewards:nan"), ("one_too_few", "tests.system.rewards:one_too_few")],
)
def test_a_reward_that_fails_ends_the_command_with_one_sentence_before_anything_is_trained(
    reward: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, reward, f"rewards=[{{kind: 'tests.system.rewards:{reward}'}}]")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert main(["train", str(file), "--no-live"]) == 1
    (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert problem in message
    assert "Traceback" not in message
    assert not (folder(config) / "checkpoints").exists()
    assert not list((folder(config) / "journal").glob("*"))
