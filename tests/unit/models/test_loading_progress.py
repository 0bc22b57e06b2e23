"""Who loads a checkpoint in several files says how many of them are loaded."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from diffusers import FluxTransformer2DModel
from diffusers.models import modeling_utils

from solrl_ray import models
from solrl_ray.common import progress_note
from tests.support import tiny


def test_shards_are_counted_while_they_are_loaded(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sharded"
    shutil.copytree(tiny_pipeline, path)
    shutil.rmtree(path / "transformer")
    whole = FluxTransformer2DModel.from_pretrained(tiny_pipeline, subfolder="transformer")
    whole.save_pretrained(path / "transformer", max_shard_size="100KB")
    shards = len(list((path / "transformer").glob("*.safetensors")))
    assert shards > 2
    load, said = modeling_utils._load_shard_file, []

    def seen(*arguments: Any, **keywords: Any) -> Any:
        said.append(progress_note.now())
        time.sleep(0.11)  # a bar counts what is done once a tenth of a second
        return load(*arguments, **keywords)

    monkeypatch.setattr(modeling_utils, "_load_shard_file", seen)
    models.load(tiny.model_config(path), "cpu", components={"transformer"})
    assert said == [f"loading transformer, {done} of {shards} shards" for done in range(shards)]
