"""Encoding in a plan: counted on text encoders of published and of tiny sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solrl_ray import models
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.schema import Config
from solrl_ray.models.shapes import shipped
from solrl_ray.plan.arithmetic import EncodingCosts, describe
from solrl_ray.plan.model_facts import model_facts
from solrl_ray.plan.outline import facts_of
from solrl_ray.prompts.encoding import encode_prompts
from solrl_ray.prompts.prompt_set import read_prompts
from tests.support import families, tiny
from tests.support.documents import ROOT
from tests.support.editing import write_prompts


def config(*overrides: str, **changes: Any) -> Config:
    made = load([ROOT / "configs" / "demo.yaml"], overrides)
    changes = {"family": "flux", "dtype": "bfloat16", "max_sequence_length": 128} | changes
    return made.model_copy(update={"model": made.model.model_copy(update=changes)})


def costs_of(config: Config) -> EncodingCosts:
    """With the text encoders of FLUX.1-dev, whose sizes are in the package."""
    shapes = shipped(config.model.model_copy(update={"path": "black-forest-labs/FLUX.1-dev"}))
    assert shapes is not None
    found = describe(config, facts_of(config, Sources(), shapes, "bf16")).encoding
    assert found is not None
    return found


def test_t5_xxl_takes_minutes_a_prompt_on_a_cpu_thread() -> None:
    costs = costs_of(config())
    assert 77 < costs.seconds(1) < 90  # 77 to 185 s were measured, and loading
    assert costs.weight_bytes == pytest.approx(9.77e9, rel=0.01)  # 4.76e9 + 0.123e9 parameters
    assert costs.prompt_bytes == 2 * (128 * 4096 + 768)
    assert costs.seconds(0) == 0


def test_cards_share_whole_micro_batches() -> None:
    on_cards = ("fleet={placement: colocated, learners: {num_gpus: 1}}", "learner.world_size=2")
    costs = costs_of(config(*on_cards))
    assert (costs.batch, costs.encoders) == (16, 2)
    # 17 rows; 2 FLOP for each of T5's 4.63e9 and CLIP's 85e6 parameters beside their tables.
    assert costs.batch_seconds == pytest.approx(17 * 2 * (4.63e9 * 128 + 85e6 * 77) / 300e12, rel=0.01)
    assert costs.seconds(33) - costs.load_seconds == pytest.approx(2 * costs.batch_seconds)
    assert costs.seconds(2048) < 60


def test_threads_and_encoders_of_a_cpu_machine_count() -> None:
    one = costs_of(config())
    many = costs_of(config("fleet.encoders={count: 3, threads: 4}"))
    assert many.batch_seconds == pytest.approx(one.batch_seconds / 4)
    assert many.seconds(4) - many.load_seconds == pytest.approx(2 * many.batch_seconds)


@pytest.mark.parametrize("family", families.BUILDERS)
def test_bytes_are_those_of_a_real_embedding_and_of_real_weights(family: str, tmp_path: Path) -> None:
    path = families.BUILDERS[family](tmp_path / "pipeline")
    own = family in ("qwen_image_edit", "wan21_i2v")
    longest = {} if own else {"max_sequence_length": tiny.T5_TOKENS}
    model = families.model_config(family, path, **longest)
    made = config().model_copy(update={"model": model})
    costs = describe(made, model_facts(made)).encoding
    assert costs is not None
    loaded = models.load(model, "cpu", components=models.encoder_components(model))
    (prompt,) = read_prompts(str(write_prompts(tmp_path / "p.jsonl", ["a dog"], model.shapes[0].width)))
    (encoded,) = encode_prompts(loaded, [prompt])
    masks = sum(tensor.nbytes for name, tensor in encoded.items() if "mask" in name)
    # Published tokenizers of CLIP make 77 tokens.
    clip = (77 - tiny.CLIP_TOKENS) * 64 * 4 if family == "sd3" else 0
    if family == "wan21_i2v":  # the published one sees a picture as 257 tokens of 1,280 channels
        clip = 257 * 1280 * 4 - encoded["image_embeds"].nbytes
    assert costs.prompt_bytes == sum(tensor.nbytes for tensor in encoded.values()) - masks + clip
    parameters = {id(each): each.nbytes for each in loaded._text.encoders.parameters()}
    assert costs.weight_bytes == sum(parameters.values())
