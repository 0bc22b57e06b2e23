"""Characters such as ², which are digits to Python and no number."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.cli import main
from solrl_ray.common import ray_auth
from solrl_ray.config.loading import load
from solrl_ray.errors import UserError
from solrl_ray.report.grids import picture_paths
from tests.support.documents import ROOT


def test_a_key_has_no_such_index() -> None:
    with pytest.raises(UserError, match=r"rewards is a list of 1 entries, so '²' must be a whole number below 1"):
        load([ROOT / "configs" / "demo.yaml"], ["rewards.².kind=clipscore"])


def test_an_address_has_no_such_port() -> None:
    with pytest.raises(UserError, match=r"is 'head:²'; it must be the Ray cluster's host and port"):
        ray_auth.check_access("head:²", seconds=1.0)


def test_a_picture_has_no_such_number(tmp_path: Path) -> None:
    (tmp_path / "aa-².png").touch()
    with pytest.raises(UserError, match=r"aa-²\.png is not named <prompt id>-<sample>\.png"):
        picture_paths(tmp_path)


def test_so_many_prompts_cannot_be_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    sizes = ["--heldout", "²", "--out", str(tmp_path / "out")]
    assert main(["prompts", "import", str(tmp_path / "prompts.txt"), *sizes]) == 2
    assert "²" in capsys.readouterr().err
