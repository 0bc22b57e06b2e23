"""What Qwen-Image alone has: a template that is cut off, a mask of the text's padding, tables of positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline

from solrl_ray import models
from solrl_ray.config.schema import Model
from solrl_ray.models.qwen_image import fixed_length
from solrl_ray.records import PromptEmbedding
from tests.support import tiny, tiny_qwen

LENGTH = 64
SUFFIX = 1 + 1 + 1 + 1 + 1
"""Tokens that follow a prompt: <|im_end|>, newline, <|im_start|>, assistant, newline."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen.build_qwen_image(tmp_path_factory.mktemp("qwen_image") / "pipeline")


def config(path: Path, **changes: object) -> Model:
    return tiny.model_config(path, family="qwen_image", **({"max_sequence_length": LENGTH} | changes))


def test_texts_of_a_batch_are_masked_as_in_the_stock_pipeline(path: Path) -> None:
    texts = ["a", "two blue circles with a ring"]
    model = models.load(config(path), "cpu", components={"text", "transformer"})
    made = zip(texts, model.encode(texts), strict=True)
    batch = model.batch_embeddings([PromptEmbedding(prompt_id=t, tensors=e, digest=t) for t, e in made])
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    stock = QwenImagePipeline.from_pretrained(path)
    stock.text_encoder.eval()
    with torch.no_grad():
        sequence, mask = stock.encode_prompt(texts, max_sequence_length=LENGTH)
        assert sequence.shape[1] == len(texts[1]) + SUFFIX
        expected = stock.transformer(
            hidden_states=latents,
            timestep=torch.full((2,), 0.25),
            encoder_hidden_states=sequence,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, 4, 4)]] * 2,
            return_dict=False,
        )[0]
        ours = model.velocity(latents, 0.25, batch)
        alone = model.velocity(latents[:1], 0.25, {name: value[:1] for name, value in batch.items()})
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone, ours[:1], atol=1e-5, rtol=0)


def test_a_text_that_does_not_fit_is_no_text_of_that_length() -> None:
    with pytest.raises(ValueError, match="a text of 5 tokens does not fit into 4"):
        fixed_length([torch.zeros(5, 2)], 4)
