"""A small whole configuration in two files, and the sentence that refuses one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError

MODEL = """
model:
  family: flux
  path: some/model
  resolution: 512
  max_sequence_length: 128
  schedule: {kind: flux}
  lora: {targets: [to_q, to_k]}
"""
REST = """
prompts: {train: train.txt, heldout: heldout.txt}
rewards:
  - {kind: clipscore, path: some/clip}
  - {kind: "package.module:function", weight: 0.5}
"""


def changed(config: Config, **sections: dict[str, Any] | list[Any]) -> Config:
    """The configuration with other values: ``changed(config, fleet={"deadlines": {"update": 1.0}})``."""
    return Config.model_validate(_merged(config.model_dump(mode="json"), sections))


def _merged(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    inner = {key for key, other in others.items() if isinstance(other, dict) and isinstance(values[key], dict)}
    return values | others | {key: _merged(values[key], others[key]) for key in inner}


def refusal(files: list[Path], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(files, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message
