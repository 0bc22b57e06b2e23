"""A small whole configuration in two files, and the sentence that refuses one."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config.loading import load
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


def refusal(files: list[Path], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(files, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message
