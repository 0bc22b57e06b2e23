"""``~`` and ``~name`` stand for a home wherever a path is given, and a home that is not there is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from solrl_ray.cli import main

NOBODY = "~nobody-of-that-name/x"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", f"run.root={NOBODY}"],
        ["--set", f"run.init={NOBODY}"],
        ["--set", f"prompts.train={NOBODY}.txt"],
        ["--set", f"model.path={NOBODY}"],
        ["--set", f"rewards=[{{kind: {NOBODY}.py:mine}}]"],
        ["--set", f"rewards=[{{kind: clipscore, path: {NOBODY}}}]"],
        [NOBODY + ".yaml"],
    ],
    ids=lambda arguments: arguments[-1].partition("=")[0],
)
def test_a_home_that_is_not_there_is_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no demo was trained
    assert main(["train", "demo", "--dry-run", *arguments]) == 2
    assert "this machine knows no home ~nobody-of-that-name; write its whole path" in capsys.readouterr().err


def test_a_home_in_an_option_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "p.txt").write_text("a cat\n")
    assert main(["prompts", "import", "~/p.txt", "--out=~/made"]) == 0
    assert (tmp_path / "made" / "train.jsonl").is_file()


def test_a_user_without_a_home_is_told_to_name_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4242)  # a user that no list of users has
    assert main(["list"]) == 2
    assert "set HOME to a folder" in capsys.readouterr().err
