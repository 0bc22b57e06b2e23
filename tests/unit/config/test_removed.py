"""What is said about keys, commands and options that earlier versions had."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config import removed
from solrl_ray.config.problems import keys
from tests.support.command_line import refusal


@pytest.mark.parametrize("key", [key for key in removed.KEYS if key not in set(keys())])
def test_a_removed_key_is_refused_with_what_to_use_now(
    key: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "plan", config_file, "--set", f"{key}=1")
    assert key in said and "--set" in said and removed.KEYS[key] in said
