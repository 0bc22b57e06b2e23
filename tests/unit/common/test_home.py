"""Tokens and caches have a folder where the home is unset or cannot be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from solrl_ray.cli import main
from solrl_ray.common import home
from solrl_ray.models import compilation

NAMES = ("HF_HOME", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TRITON_HOME")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files; the home is one that can only be read."""
    (tmp_path / "home").mkdir()
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "home")
    for name in NAMES:
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    return tmp_path / "shared"


def test_a_home_that_cannot_be_written_is_replaced_for_what_is_written_and_still_read(shared: Path) -> None:
    hub = Path.home() / ".cache" / "huggingface"
    hub.mkdir(parents=True)
    home.settle()
    private = shared / f"solrl-{os.getuid()}"
    assert private.stat().st_mode & 0o777 == 0o700
    assert os.environ["HF_HOME"] == str(hub)
    assert compilation.cache_folder("").is_relative_to(private)
    file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    token = file.read_text()
    assert len(bytes.fromhex(token)) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    del os.environ["RAY_AUTH_TOKEN_PATH"]
    home.settle()
    assert file.read_text() == token  # of a later command


def test_a_token_that_can_be_read_stays_the_users(shared: Path) -> None:
    (Path.home() / ".ray").mkdir()
    (Path.home() / ".ray" / "auth_token").write_text("mine")
    home.settle()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_a_folder_that_others_can_open_is_not_taken(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shared / f"solrl-{os.getuid()}").mkdir(mode=0o755)
    assert main(["list"]) == 2
    assert capsys.readouterr().err.endswith("is open to others; set HOME to a folder of this user.\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make such a folder")
def test_a_folder_of_somebody_else_is_not_taken(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shared / f"solrl-{os.getuid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 4242, -1)
    assert main(["list"]) == 2
    assert str(folder) in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_without_a_home_there_is_one(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4242)  # a user that no list of users has
    (shared / "solrl-4242").mkdir(mode=0o700)
    os.chown(shared / "solrl-4242", 4242, -1) if os.geteuid() == 0 else pytest.skip("only root can make such a folder")
    home.settle()
    assert Path.home() == shared / "solrl-4242"
