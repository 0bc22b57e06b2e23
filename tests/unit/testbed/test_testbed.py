"""The small world: captions, pictures, the shipped tokenizers and checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from safetensors import safe_open
from testbed_assets import captions
from transformers import AutoTokenizer

from solrl_ray import rewards
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.records import Address
from solrl_ray.testbed import world

ASSETS = Path(world.__file__).parent / "assets"
HELDOUT = (ASSETS / "prompts" / "heldout.txt").read_text().splitlines()
PAIR = "a small blue ring left of a large green cross on white"
LONE = "a large red circle on black"


def scenes(count: int = 200) -> torch.Tensor:
    return captions.draw(count, torch.Generator().manual_seed(0), single=0.3)


def still() -> torch.Tensor:
    """The jitter that leaves every object at its place and size."""
    return torch.full((1, world.JITTERS), 0.5)


def fields(caption: str) -> torch.Tensor:
    return torch.tensor([world.parse(caption).fields])


# Captions


def test_a_caption_says_its_scene_and_the_scene_its_caption():
    for row in scenes():
        scene = world.Scene(tuple(row.tolist()))
        assert world.parse(scene.caption) == scene
    assert world.parse(PAIR).fields == (2, 0, 2, 4, 0, 1, 1, 3, 1)
    assert world.parse(LONE).fields == (1, 1, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "text", ["", "a red circle", "a large red circle", PAIR + " and a dog", "a large red CIRCLE on black"]
)
def test_a_text_outside_the_grammar_is_refused_and_named(text: str):
    with pytest.raises(ValueError, match="is not a caption of the testbed's world") as error:
        world.parse(text)
    assert repr(text) in str(error.value)


# Pictures


def test_a_lone_circle_is_a_disc_of_its_colour_in_the_middle():
    image = world.render(fields(LONE), still())[0]
    assert image.shape == (3, 32, 32)
    torch.testing.assert_close(image[:, 15, 15], torch.tensor([0.90, 0.10, 0.10]))
    torch.testing.assert_close(image[:, 0, 0], torch.tensor([0.03, 0.03, 0.03]))
    covered = ((image[0] - 0.03) / (0.90 - 0.03)).sum().item()
    # Half extent 0.40 of 16 pixels: a disc of radius 6.4 pixels.
    assert covered == pytest.approx(math.pi * 6.4**2, rel=0.01)


@pytest.mark.parametrize(
    ("relation", "pixel"), [("left of", (16, 8)), ("right of", (16, 23)), ("above", (8, 16)), ("below", (23, 16))]
)
def test_the_first_object_stands_where_the_relation_says(relation: str, pixel: tuple[int, int]):
    caption = f"a large yellow square {relation} a small blue circle on grey"
    image = world.render(fields(caption), still())[0]
    row, column = pixel
    torch.testing.assert_close(image[:, row, column], torch.tensor([0.98, 0.90, 0.10]))
    torch.testing.assert_close(image[:, 31 - row, 31 - column], torch.tensor([0.15, 0.25, 0.95]))


def test_shapes_differ_in_area_as_their_geometry_says():
    area = {}
    for shape in world.SHAPES:
        image = world.render(fields(f"a large red {shape} on black"), still())[0]
        area[shape] = ((image[0] - 0.03) / (0.90 - 0.03)).sum().item() / 6.4**2
    # In units of the half extent: square 1.72², ring between 0.54 and 1.02, cross two bars of 2 × 0.64.
    assert area["square"] == pytest.approx(1.72**2, rel=0.02)
    assert area["ring"] == pytest.approx(math.pi * (1.02**2 - 0.54**2), rel=0.03)
    assert area["cross"] == pytest.approx(2 * 2 * 0.64 - 0.64**2, rel=0.03)
    # Triangle: apex at -1, base at 0.85, half width (0.85 + 1) / 2.
    assert area["triangle"] == pytest.approx(0.5 * 1.85**2, rel=0.03)


def test_a_picture_is_a_function_of_its_address():
    def at(index: int) -> torch.Tensor:
        return world.picture(PAIR, Address(run_seed=42, purpose="reference", prompt_id="0", index=index))

    assert torch.equal(at(0), at(0))
    assert not torch.equal(at(0), at(1))
    assert at(0).shape == (3, 32, 32)
    assert at(0).dtype == torch.float32
    assert 0.0 <= at(0).min() <= at(0).max() <= 1.0


def test_every_word_is_one_token_and_other_words_still_encode():
    clip, t5 = (AutoTokenizer.from_pretrained(ASSETS / "pipeline" / name) for name in ("tokenizer", "tokenizer_2"))
    words = {word for values in world.FIELD_VALUES for phrase in values for word in phrase.split()} | {"a", "on"}
    assert all(len(clip(word).input_ids) == 3 and len(t5(word).input_ids) == 2 for word in words)
    assert t5.unk_token_id not in t5("a zebra, 2 tall").input_ids
    assert clip.decode(clip("a zebra").input_ids, skip_special_tokens=True) == "a zebra"


# What ships


def test_no_two_of_the_shipped_prompts_describe_the_same_pictures():
    train = (ASSETS / "prompts" / "train.txt").read_text().splitlines()
    assert (len(train), len(HELDOUT)) == (2048, 96)
    meanings = captions.meaning(torch.tensor([world.parse(text).fields for text in train + HELDOUT]))
    assert len(meanings.unique()) == 2048 + 96


def test_the_assets_are_small_and_in_bfloat16():
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6_000_000
    for path in (path for path in files if path.suffix == ".safetensors"):
        with safe_open(path, "pt") as tensors:
            kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        assert kinds <= {"BF16", "I64"}, path


def test_the_shipped_configuration_names_no_place_where_it_was_made():
    index = json.loads((ASSETS / "pipeline" / "model_index.json").read_text())
    assert index["_class_name"] == "FluxPipeline"
    assert not any("_name_or_path" in path.read_text() for path in ASSETS.rglob("*.json"))


@pytest.fixture(scope="module")
def pipeline() -> FluxPipeline:
    pipeline = FluxPipeline.from_pretrained(ASSETS / "pipeline", torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_the_reward_tells_right_pictures_from_wrong_ones():
    texts = HELDOUT[:16]
    reward = rewards.load([RewardConfig(kind="clipscore", path="builtin:testbed/reward")], "cpu")
    images = torch.stack([world.picture(t, Address(run_seed=1, purpose="test", index=i)) for i, t in enumerate(texts)])
    assert reward.score(images, texts).mean() > 0.85
    assert reward.score(images.roll(1, 0), texts).mean() < 0.3


def test_the_stock_pipeline_draws_recognisable_but_imperfect_pictures(pipeline: FluxPipeline):
    texts = HELDOUT[:16]
    images = pipeline(
        texts,
        height=32,
        width=32,
        num_inference_steps=6,
        guidance_scale=1.0,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images
    reward = rewards.load([RewardConfig(kind="clipscore", path="builtin:testbed/reward")], "cpu")
    assert 0.3 < reward.score(images.float(), texts).mean() < 0.7


def test_latents_of_real_pictures_have_unit_size_and_decode_to_the_picture(pipeline: FluxPipeline):
    vae = pipeline.vae
    images = world.render(scenes(64), torch.rand(64, world.JITTERS, generator=torch.Generator().manual_seed(2)))
    with torch.no_grad():
        latents = (vae.encode(images * 2 - 1).latent_dist.mean - vae.config.shift_factor) * vae.config.scaling_factor
        restored = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample / 2 + 0.5
    assert latents.mean().abs() < 0.1
    assert latents.std() == pytest.approx(1.0, abs=0.1)
    assert -10 * math.log10((restored - images).square().mean().item()) > 33
