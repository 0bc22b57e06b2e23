"""Fixtures shared by all tests: tiny checkpoints of the real classes, built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a FLUX-class pipeline with AutoencoderKL."""
    return tiny.build_pipeline(tmp_path_factory.mktemp("tiny") / "pipeline")


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a CLIPModel with tokenizer and image processor."""
    return tiny.build_clip(tmp_path_factory.mktemp("tiny") / "clip")
