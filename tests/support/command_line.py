"""Running a command as a user does, and what a run leaves that has just begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.cli import main
from solrl_ray.config.loading import load, to_yaml
from solrl_ray.storage.continuation import FORMAT, FORMAT_FILE


def solrl(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command that succeeds prints."""
    assert solrl(*arguments) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a refused command prints."""
    assert solrl(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").strip()


def begin(folder: Path, config_file: Path, *overrides: str) -> None:
    """Leave behind what a run leaves behind when it has just begun."""
    folder.mkdir(parents=True)
    (folder / FORMAT_FILE).write_text(str(FORMAT))
    (folder / "config.yaml").write_text(to_yaml(load([config_file], overrides)))
