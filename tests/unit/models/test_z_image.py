"""What Z-Image alone has: time and velocity the other way round, and shapes that depend on the text, made fixed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import ZImageTransformer2DModel

from solrl_ray import models
from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError
from solrl_ray.models.z_image_layers import aligned
from tests.support import tiny, tiny_qwen
from tests.support.tensors import randn as noise

WIDTH = 24
LENGTH = 96


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen.build_z_image(tmp_path_factory.mktemp("z_image") / "pipeline")


def config(path: Path, **changes: object) -> Model:
    return tiny.model_config(path, family="z_image", **({"max_sequence_length": LENGTH} | changes))


@pytest.mark.parametrize("lengths", [(1, 96), (31, 33), (32, 64), (40, 40)])
@pytest.mark.parametrize("resolution", [16, 28])  # 16 and 49 image tokens: both filled up, to 32 and to 64
def test_texts_of_any_length_give_the_stock_transformers_velocity(
    path: Path, lengths: tuple[int, int], resolution: int
) -> None:
    model = models.load(config(path, resolution=resolution), "cpu", components={"transformer"})
    stock = ZImageTransformer2DModel.from_pretrained(path, subfolder="transformer").eval()
    texts = [noise(length, WIDTH, seed=length) for length in lengths]
    # What stands beyond a text's own tokens is not looked at.
    sequence, mask = torch.full((2, LENGTH, WIDTH), 9.0), torch.zeros(2, LENGTH)
    for i, text in enumerate(texts):
        sequence[i, : len(text)], mask[i, : len(text)] = text, 1
    latents, sigmas = noise(2, *model.latent_shape), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        ours = model.velocity(latents, sigmas, {"prompt_embeds": sequence, "prompt_embeds_mask": mask})
        expected = stock(list(latents.unsqueeze(2).unbind()), 1 - sigmas, texts, return_dict=False)[0]
    torch.testing.assert_close(ours, -torch.stack(expected).squeeze(2), atol=1e-5, rtol=0)
    assert ours.std() > 0.01


@pytest.mark.parametrize(("tokens", "expected"), [(1, 32), (32, 32), (33, 64)])
def test_tokens_are_counted_up_to_a_multiple_of_32(tokens: int, expected: int) -> None:
    assert aligned(tokens) == expected
    assert aligned(torch.tensor([tokens])).tolist() == [expected]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resolution": 132}, r"model\.resolution is 132, but the positions of .* end at 128 px"),
        ({"max_sequence_length": 225}, r"model\.max_sequence_length is 225, but the positions of .* end at 224"),
    ],
)
def test_what_is_beyond_the_positions_of_the_transformer_is_refused(
    path: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        models.load(config(path, **changes), "cpu", components=())
