"""Encoding in a plan: counted on text encoders of published and of tiny sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solrl_ray import models
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.schema import Config
from solrl_ray.models.shapes import DTYPE_BYTES, shipped
from solrl_ray.planning.arithmetic import describe
from solrl_ray.planning.model_facts import model_facts
from solrl_ray.planning.outline import facts_of
from solrl_ray.prompts.encoding import encode_prompts
from solrl_ray.prompts.prompt_set import read_prompts
from tests.support import families, tiny
from tests.support.documents import ROOT
from tests.support.editing import write_prompts


def config(*overrides: str, **changes: Any) -> Config:
    made = load([ROOT / "configs" / "demo.yaml"], overrides)
    changes = {"family": "flux", "dtype": "bfloat16", "max_sequence_length": 128} | changes
    return made.model_copy(update={"model": made.model.model_copy(update=changes)})


def test_a_plan_says_how_many_encoders_encode_what_and_the_bytes_that_it_takes() -> None:
    """With the text encoders of FLUX.1-dev, whose sizes are in the package: 4.76e9 + 0.123e9 parameters."""
    made = config("fleet={placement: colocated, learners: {num_gpus: 1}}", "learner.world_size=2")
    shapes = shipped(made.model.model_copy(update={"path": "black-forest-labs/FLUX.1-dev"}))
    assert shapes is not None
    facts = facts_of(made, Sources(), shapes, "bf16")
    assert facts.embedding_bytes == 2 * (128 * 4096 + 768)
    said = dict(describe(made, facts, train_prompts=900, heldout_prompts=100).rows())["encode"]
    assert said == (
        "prompts of 16 iterations at a time, in batches of 16 on 2 encoders · meanwhile 9.77 GB of text encoders "
        "on each encoder's device · 1.05 MB of disk per prompt, at most 1.05 GB"
    )


@pytest.mark.parametrize("family", families.BUILDERS)
def test_bytes_are_those_of_a_real_embedding_and_of_real_weights(family: str, tmp_path: Path) -> None:
    path = families.BUILDERS[family](tmp_path / "pipeline")
    own = family in ("qwen_image_edit", "wan21_i2v")
    longest = {} if own else {"max_sequence_length": tiny.T5_TOKENS}
    model = families.model_config(family, path, **longest)
    made = config().model_copy(update={"model": model})
    facts = model_facts(made)
    loaded = models.load(model, "cpu", components=models.encoder_components(model))
    (prompt,) = read_prompts(str(write_prompts(tmp_path / "p.jsonl", ["a dog"], model.shapes[0].width)))
    (encoded,) = encode_prompts(loaded, [prompt])
    masks = sum(tensor.nbytes for name, tensor in encoded.items() if "mask" in name)
    # Published tokenizers of CLIP make 77 tokens.
    clip = (77 - tiny.CLIP_TOKENS) * 64 * 4 if family == "sd3" else 0
    if family == "wan21_i2v":  # the published one sees a picture as 257 tokens of 1,280 channels
        clip = 257 * 1280 * 4 - encoded["image_embeds"].nbytes
    assert facts.embedding_bytes == sum(tensor.nbytes for tensor in encoded.values()) - masks + clip
    parameters = {id(each): each.nbytes for each in loaded._text.encoders.parameters()}
    assert facts.text_parameters * DTYPE_BYTES[model.dtype] == sum(parameters.values())
