"""What is made of a configuration before it goes to an actor."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.client.launch import located
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from tests.support.small import small_config


def uploading(tmp_path: Path, place: str) -> Config:
    return small_config(tmp_path, "run", f"checkpoints.upload={place}")


def test_a_home_is_expanded_in_the_place_of_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert located(uploading(tmp_path, "~/kept")).checkpoints.upload == f"{tmp_path}/kept"
    assert located(uploading(tmp_path, "s3://bucket/~/kept")).checkpoints.upload == "s3://bucket/~/kept"
    with pytest.raises(UserError, match=r"^checkpoints\.upload is '~nobody-here/kept', but this machine knows no home"):
        located(uploading(tmp_path, "~nobody-here/kept"))
