"""Encoding in a plan: counted on text encoders of published and of tiny sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from solrl_ray import models
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.prompts.encoding_costs import encoding_costs
from tests.support import families, tiny
from tests.support.documents import ROOT


@pytest.fixture(scope="module")
def published() -> dict[str, nn.Module]:
    """Those of FLUX.1-dev."""
    with torch.device("meta"):
        clip = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12))
        t5 = T5EncoderModel(
            T5Config(d_model=4096, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
        )
    return {"text_encoder": clip, "text_encoder_2": t5}


FLUX = {"joint_attention_dim": 4096, "pooled_projection_dim": 768}


def config(*overrides: str, **changes: Any) -> Config:
    made = load([ROOT / "configs" / "demo.yaml"], overrides)
    changes = {"family": "flux", "dtype": "bfloat16", "max_sequence_length": 128} | changes
    return made.model_copy(update={"model": made.model.model_copy(update=changes)})


def test_t5_xxl_takes_minutes_a_prompt_on_a_cpu_thread(published: dict[str, nn.Module]) -> None:
    costs = encoding_costs(config(), published, FLUX)
    assert 77 < costs.seconds(1) < 90  # 77 to 185 s were measured, and loading
    assert costs.weight_bytes == pytest.approx(9.77e9, rel=0.01)  # 4.76e9 + 0.123e9 parameters
    assert costs.prompt_bytes == 2 * (128 * 4096 + 768)
    assert costs.seconds(0) == 0


def test_cards_share_whole_micro_batches(published: dict[str, nn.Module]) -> None:
    on_cards = ("fleet={placement: colocated, learners: {num_gpus: 1}}", "learner.world_size=2")
    costs = encoding_costs(config(*on_cards), published, FLUX)
    assert (costs.batch, costs.encoders) == (16, 2)
    # 17 rows; 2 FLOP for each of T5's 4.63e9 and CLIP's 85e6 parameters beside their tables.
    assert costs.batch_seconds == pytest.approx(17 * 2 * (4.63e9 * 128 + 85e6 * 77) / 300e12, rel=0.01)
    assert costs.seconds(33) - costs.load_seconds == pytest.approx(2 * costs.batch_seconds)
    assert costs.seconds(2048) < 60


def test_threads_and_encoders_of_a_cpu_machine_count(published: dict[str, nn.Module]) -> None:
    one = encoding_costs(config(), published, FLUX)
    many = encoding_costs(config("fleet.encoders={count: 3, threads: 4}"), published, FLUX)
    assert many.batch_seconds == pytest.approx(one.batch_seconds / 4)
    assert many.seconds(4) - many.load_seconds == pytest.approx(2 * many.batch_seconds)


@pytest.mark.parametrize("family", families.BUILDERS)
def test_bytes_are_those_of_a_real_embedding_and_of_real_weights(family: str, tmp_path: Path) -> None:
    path = families.BUILDERS[family](tmp_path / "pipeline")
    model = families.model_config(family, path, max_sequence_length=tiny.T5_TOKENS)
    costs = encoding_costs(
        config().model_copy(update={"model": model}),
        models.family(model).text_skeletons(model),
        models.family(model).settings(model)[0],
    )
    loaded = models.load(model, "cpu", components={"text"})
    (encoded,) = loaded.encode(["a dog"])
    masks = sum(tensor.nbytes for name, tensor in encoded.items() if "mask" in name)
    # Published tokenizers of CLIP make 77 tokens.
    clip = (77 - tiny.CLIP_TOKENS) * 64 * 4 if family == "sd3" else 0
    assert costs.prompt_bytes == sum(tensor.nbytes for tensor in encoded.values()) - masks + clip
    parameters = {id(each): each.nbytes for each in loaded._text.encoders.parameters()}
    assert costs.weight_bytes == sum(parameters.values())
