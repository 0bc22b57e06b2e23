"""The small world: captions, pictures, token ids, the shipped checkpoints."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from diffusers import FluxPipeline
from safetensors import safe_open

from solrl_ray import rewards
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.records import Address
from solrl_ray.testbed import captions, flow_matching, world
from solrl_ray.testbed.architecture import ASSETS, flux_pipeline
from solrl_ray.testbed.build import prompt_sets
from solrl_ray.testbed.pretraining import Training
from solrl_ray.testbed.wordpieces import clip_tokenizer, t5_tokenizer, words

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


def meaning(caption: str) -> int:
    return int(captions.meaning(fields(caption)))


def test_mirrored_captions_mean_the_same_and_nothing_else_does():
    assert meaning(PAIR) == meaning("a large green cross right of a small blue ring on white")
    assert meaning(PAIR) != meaning("a large green cross left of a small blue ring on white")
    above, below = (meaning(f"a small red ring {r} a small red ring on grey") for r in ("above", "below"))
    assert above == below


def test_of_all_scenes_those_of_two_objects_mean_the_same_in_pairs():
    indices = torch.cartesian_prod(*[torch.arange(len(values)) for values in world.FIELD_VALUES])
    pairs = torch.cat([torch.full((len(indices), 1), 2), indices], dim=1)
    lone = torch.cat([torch.ones(len(indices), 1, dtype=torch.long), indices], dim=1)
    lone[:, 4:8] = 0
    # 2 sizes × 8 colours × 5 shapes, twice with 4 relations, on 3 backgrounds.
    assert (len(captions.meaning(pairs).unique()), len(captions.meaning(lone).unique())) == (80 * 80 * 4 * 3 // 2, 240)


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


# Batches of captions


def test_corruption_replaces_the_stated_share_of_words():
    batch = captions.draw(4000, torch.Generator().manual_seed(0), single=0.0)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(captions.corrupt(batch, 0.0, generator), batch)
    changed = (captions.corrupt(batch, 0.25, generator) != batch)[:, 1:].float().mean(dim=0)
    kinds = torch.tensor([len(values) for values in world.FIELD_VALUES])
    # A random word of n is the old one with probability 1 / n.
    torch.testing.assert_close(changed, 0.25 * (1 - 1 / kinds), atol=0.02, rtol=0)


def test_a_near_miss_differs_in_one_word_or_by_an_exchange():
    batch = scenes()
    missed = captions.neighbours(batch, torch.Generator().manual_seed(1))
    for before, after in zip(batch.tolist(), missed.tolist(), strict=True):
        differing = [i for i in range(9) if before[i] != after[i]]
        exchanged = differing in ([1, 5], [2, 6], [3, 7]) and [after[i] for i in differing[::-1]] == [
            before[i] for i in differing
        ]
        assert len(differing) <= 1 or exchanged
        assert before[0] == after[0]


def test_token_ids_of_a_batch_are_those_of_the_tokenizers():
    batch = scenes()
    texts = [world.Scene(tuple(row.tolist())).caption for row in batch]
    table = captions.TokenTable(torch.device("cpu"))
    for tokenizer, ids in ((clip_tokenizer(), table.clip(batch)), (t5_tokenizer(), table.t5(batch))):
        expected = tokenizer(texts, padding="max_length", max_length=16, truncation=True, return_tensors="pt").input_ids
        assert torch.equal(ids, expected)


def test_every_word_is_one_token_and_other_words_still_encode():
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    assert all(len(clip(word).input_ids) == 3 and len(t5(word).input_ids) == 2 for word in words())
    assert t5.unk_token_id not in t5("a zebra, 2 tall").input_ids
    assert clip.decode(clip("a zebra").input_ids, skip_special_tokens=True) == "a zebra"


# What ships


def test_prompt_files_hold_the_prompt_sets_and_share_no_scene():
    train, heldout = ((ASSETS / "prompts" / f"{name}.txt").read_text().splitlines() for name in ("train", "heldout"))
    assert (train, heldout) == prompt_sets()
    assert (len(train), len(heldout)) == (2048, 96)
    assert len({meaning(text) for text in train + heldout}) == 2048 + 96


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
    texts = prompt_sets()[1][:16]
    reward = rewards.load([RewardConfig(kind="clipscore", path="builtin:testbed/reward")], "cpu")
    images = torch.stack([world.picture(t, Address(run_seed=1, purpose="test", index=i)) for i, t in enumerate(texts)])
    assert reward.score(images, texts).mean() > 0.85
    assert reward.score(images.roll(1, 0), texts).mean() < 0.3


def test_the_stock_pipeline_draws_recognisable_but_imperfect_pictures(pipeline: FluxPipeline):
    texts = prompt_sets()[1][:16]
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


# Training


def test_rectification_trains_on_the_models_own_pairs_and_takes_its_disturbance_back():
    pipeline = flux_pipeline(0)
    before = copy.deepcopy(pipeline.transformer.state_dict())
    noise = flow_matching._RoundingNoise(pipeline.transformer, torch.Generator().manual_seed(0))
    noise.add()
    moved = {name for name, value in pipeline.transformer.state_dict().items() if not torch.equal(value, before[name])}
    assert "single_transformer_blocks.0.attn.to_q.weight" in moved
    assert not any("norm" in name or "embed" in name for name in moved)
    noise.remove()
    assert all(torch.equal(value, before[name]) for name, value in pipeline.transformer.state_dict().items())

    training = Training(steps=2, batch=4, lr=1e-3, seed=0, averaging=0.9)
    result = flow_matching.rectify(pipeline, training, pairs=4, heldout=torch.tensor([0]), device=torch.device("cpu"))
    # On its own pairs a model is nearly right before it learns; on the world's it would be off by about 2.
    assert 0 < result["loss"] < 0.05
    assert not torch.equal(pipeline.transformer.proj_out.weight, before["proj_out.weight"])
