"""Checkpoints of the published sizes: what is in them, how they are cut into files, and who reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import architectures
import diffusers
import full_size
import pytest
import torch
from common import MODELS
from full_size import Size
from random_weights import BLOCK, random_model, shards_of, write_file
from safetensors.torch import load_file
from torch import nn

from solrl_ray import models, rewards
from solrl_ray.config.loading import load
from solrl_ray.models.references import SeesReferences
from solrl_ray.records import REFERENCE_TOKENS, REFERENCES
from tests.support.small import CONFIGS

PROMPTS = ["a red circle on a blue square", "green"]
PUBLISHED = {
    "flux": {"text_encoder": 123_060_480, "text_encoder_2": 4_762_310_656, "vae": 83_819_683},
    "sd3": {"text_encoder": 123_650_304, "text_encoder_2": 694_659_840, "text_encoder_3": 4_762_310_656},
    "sana": {"text_encoder": 2_614_341_888, "transformer": 1_604_462_752},
    "qwen_image": {"text_encoder": 8_292_166_656, "transformer": 20_430_401_088},
    "z_image": {"text_encoder": 4_022_468_096},
}
"""Model → part → parameters."""


@pytest.fixture(scope="module")
def pipelines() -> dict[str, Any]:
    return {name: full_size.PIPELINES[name](Size()) for name in PUBLISHED}


def numbers(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_every_network_has_as_many_parameters_as_published(pipelines: dict[str, Any]) -> None:
    found = {
        name: {part: numbers(getattr(pipelines[name], part)) for part in parts} for name, parts in PUBLISHED.items()
    }
    assert found == PUBLISHED


def test_tokenizers_have_as_many_tokens_as_published(pipelines: dict[str, Any]) -> None:
    flux, sana = pipelines["flux"], pipelines["sana"]
    found = [len(tokenizer) for tokenizer in (flux.tokenizer, flux.tokenizer_2, sana.tokenizer)]
    assert found == [49408, 32100, 256000]
    assert flux.tokenizer_2("red circle").input_ids == flux.tokenizer_2("red  circle").input_ids
    assert len(flux.tokenizer("red circle").input_ids) == 4  # one token a word, and both ends


def test_weights_are_cut_into_the_published_shards(pipelines: dict[str, Any], tmp_path: Path) -> None:
    flux = pipelines["flux"]
    sizes = {}
    for part in ("transformer", "text_encoder_2", "vae"):
        (tmp_path / part).mkdir()
        files = shards_of(tmp_path / part, getattr(flux, part))
        sizes[part] = {
            path.name: sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / 1e9
            for path, tensors in files.items()
        }
    assert sizes["transformer"] == pytest.approx(
        {f"diffusion_pytorch_model-0000{i}-of-00003.safetensors": gb for i, gb in ((1, 9.98), (2, 9.95), (3, 3.87))},
        abs=0.01,
    )
    assert sizes["text_encoder_2"] == pytest.approx(
        {"model-00001-of-00002.safetensors": 4.99, "model-00002-of-00002.safetensors": 4.53}, abs=0.01
    )
    assert list(sizes["vae"]) == ["diffusion_pytorch_model.safetensors"]
    index = json.loads((tmp_path / "text_encoder_2/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * PUBLISHED["flux"]["text_encoder_2"]


def test_a_file_has_every_tensor_with_random_rows_that_differ(tmp_path: Path) -> None:
    tensors = {
        "linear.weight": torch.empty(4, BLOCK // 3, dtype=torch.bfloat16, device="meta"),
        "linear.bias": torch.empty(5, dtype=torch.float32, device="meta"),
        "norm.weight": torch.empty(3, dtype=torch.float16, device="meta"),
        "steps": torch.empty((), dtype=torch.int64, device="meta"),
    }
    written = write_file(tmp_path / "model.safetensors", tensors)
    read = load_file(tmp_path / "model.safetensors")
    assert written == sum(tensor.numel() * tensor.element_size() for tensor in read.values())
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in read.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    }
    assert read["linear.bias"].tolist() == [0.0] * 5
    assert read["norm.weight"].tolist() == [1.0] * 3
    weight = read["linear.weight"].float()
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    correlation = torch.corrcoef(weight) - torch.eye(4)
    assert correlation[:3, :3].abs().max().item() < 0.01


@pytest.mark.parametrize("name", full_size.PIPELINES)
def test_the_product_reads_a_tiny_checkpoint_encodes_and_decodes(name: str, tmp_path: Path) -> None:
    full_size.write_pipeline(full_size.PIPELINES[name](Size(tiny=True)), tmp_path)
    given = [CONFIGS / "methods/sol_rl.yaml", CONFIGS / "models" / MODELS[name], CONFIGS / "rewards/testbed_clip.yaml"]
    prompts = "prompts={train: builtin:testbed/prompts/train.txt, heldout: builtin:testbed/prompts/heldout.txt}"
    config = load(given, [prompts, f"model.path='{tmp_path}'", "model.resolution=64"]).model
    model = models.load(config, "cpu")
    if isinstance(model, SeesReferences):
        pictures = [torch.full((1, 3, 64, 64), shade, dtype=torch.uint8) for shade in (40, 200)]
        first, second = model.encode_seeing(PROMPTS, pictures)
        assert first[REFERENCE_TOKENS].shape == (16, 64)  # 2 × 2 cells of 8 pixels a token, 16 channels a cell
        assert not torch.equal(first[REFERENCE_TOKENS], second[REFERENCE_TOKENS])
    else:
        first, second = model.encode(PROMPTS)
    assert all(torch.isfinite(tensor.float()).all() for tensor in first.values())
    assert not torch.equal(first["prompt_embeds"], second["prompt_embeds"])
    noise = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    embedding = {key: tensor[None] for key, tensor in first.items() if key != REFERENCES}
    velocity = model.velocity(noise, 0.5, embedding)
    assert torch.isfinite(velocity).all()
    assert velocity.std() > 0
    images = model.decode(noise)
    assert images.shape == (1, 3, *config.shapes[0].dims)
    assert torch.isfinite(images).all()


def test_embeddings_of_a_model_that_edits_have_the_tokens_of_its_reference() -> None:
    files = [CONFIGS / "methods/sol_rl.yaml", CONFIGS / "models/flux1_kontext_dev.yaml"]
    given = ["prompts={train: unused, heldout: unused}", "rewards=[{kind: clipscore}]"]
    (made,) = full_size.random_embeddings(load(files, given).model, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.tensors.items()}
    expected = {"prompt_embeds": (128, 4096), "pooled_prompt_embeds": (768,), REFERENCE_TOKENS: (32 * 32, 64)}
    assert shapes == expected  # at 512 px, 16 a token


def test_a_model_that_is_filled_in_place_keeps_its_tables_of_positions() -> None:
    settings = architectures.QWEN_IMAGE | architectures.TINY["QwenImageTransformer2DModel"]
    make = lambda: diffusers.QwenImageTransformer2DModel(**settings)  # noqa: E731
    filled, usual = random_model(make, "cpu"), make()
    assert torch.equal(filled.pos_embed.pos_freqs, usual.pos_embed.pos_freqs)
    assert all(each.dtype == torch.bfloat16 and each.isfinite().all() for each in filled.parameters())
    assert 0 < filled.img_in.weight.float().std().item() < 0.05


def test_the_depth_of_transformer_and_text_encoders_is_cut() -> None:
    pipeline = full_size.PIPELINES["sana"](Size(layers=3, text_layers=4))
    assert len(pipeline.transformer.transformer_blocks) == 3
    assert len(pipeline.text_encoder.layers) == 4
    assert len(full_size.PIPELINES["flux"](Size(text_layers=1)).text_encoder_2.encoder.block) == 2


@pytest.mark.parametrize("kind", ["clipscore", "pickscore"])
def test_a_reward_network_scores_pictures(kind: str, tmp_path: Path) -> None:
    name = "clip" if kind == "clipscore" else kind
    full_size.write_reward(name, tmp_path, Size(tiny=True))
    given = f"rewards=[{{kind: {kind}, path: '{tmp_path}'}}]"
    config = load([CONFIGS / "demo.yaml"], [given])
    reward = rewards.load(config.rewards, "cpu")
    pictures = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    scores = reward.score(pictures, PROMPTS)
    assert scores.shape == (2,)
    assert scores.isfinite().all()


def test_the_two_reward_networks_have_as_many_parameters_as_published() -> None:
    found = {name: numbers(full_size.reward_network(name, Size())[0]) for name in full_size.REWARDS}
    assert found == {"clip": 427_616_513, "pickscore": 986_109_441}


def test_a_tiny_network_does_not_forget_its_input(tmp_path: Path) -> None:
    full_size.write_pipeline(full_size.PIPELINES["flux"](Size(tiny=True)), tmp_path)
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer")
    block = transformer.single_transformer_blocks[0]
    given = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    assert 0.1 < block.attn.to_q(given).std().item() < 10
