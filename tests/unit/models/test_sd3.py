"""What SD3 alone has: two CLIPs beside T5, a checkpoint without T5, timesteps in thousands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from solrl_ray import models
from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError
from tests.support import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_sd3(tmp_path_factory.mktemp("sd3") / "pipeline")


def config(path: Path, **changes: object) -> Model:
    return tiny.model_config(path, family="sd3", **changes)


def test_a_checkpoint_without_t5_has_zeros_for_it_as_in_the_stock_pipeline(tmp_path: Path) -> None:
    path = tiny.build_sd3(tmp_path / "pipeline", t5=False)
    model = models.load(config(path), "cpu", components={"text"})
    (encoded,) = model.encode(["a red square"])
    stock = StableDiffusion3Pipeline.from_pretrained(path, text_encoder_3=None, tokenizer_3=None)
    stock.text_encoder.eval()
    stock.text_encoder_2.eval()
    with torch.no_grad():
        sequence, _, pooled, _ = stock.encode_prompt("a red square", None, None, max_sequence_length=tiny.T5_TOKENS)
    assert torch.equal(encoded["prompt_embeds"], sequence[0])
    assert torch.equal(encoded["pooled_prompt_embeds"], pooled[0])
    assert not encoded["prompt_embeds"][tiny.CLIP_TOKENS :].any()
    assert [cut.tokenizer for cut in type(model).truncated(model.config, ["a"])] == ["tokenizer", "tokenizer_2"]


@pytest.mark.parametrize("resolution", [36, (16, 36), [(16, 32), (36, 16)]], ids=str)
def test_a_shape_beyond_the_positions_of_the_transformer_is_refused(path: Path, resolution: Any) -> None:
    with pytest.raises(UserError, match=r"^model\.resolution is .*36.*, but the positions of .* end at 32 px\.$"):
        models.load(config(path, resolution=resolution), "cpu", components=())
