"""What is said about keys, commands and options that earlier versions had."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config import removed
from tests.support.command_line import refusal

GIVEN = {
    "--alone": ("eval", "runs/a", "--alone"),
    "--explorers-of": ("pool", "scale", "runs/a", "--explorers-of=l40s=2"),
    "--resolution": ("validate", "flux1_dev", "--resolution", "512"),
}
"""Each removed option as it was given."""


@pytest.mark.parametrize("key", removed.KEYS)
def test_a_removed_key_is_refused_with_what_to_use_now(
    key: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "plan", config_file, "--set", f"{key}=1")
    assert key in said
    assert "--set" in said
    assert removed.KEYS[key] in said


@pytest.mark.parametrize("command", removed.COMMANDS)
def test_a_removed_command_is_refused_with_what_to_use_now(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, command, "runs/a")
    assert said == f"The command {command} was removed: {removed.COMMANDS[command]}."


@pytest.mark.parametrize("option", removed.OPTIONS)
def test_a_removed_option_is_refused_with_what_to_use_now(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, *GIVEN[option])
    assert said == f"The option {option} was removed: {removed.OPTIONS[option]}."
