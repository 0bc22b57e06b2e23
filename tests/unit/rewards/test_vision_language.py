"""Rewards on Qwen's vision-language models, from tiny checkpoints in the published layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoProcessor

from solrl_ray import rewards
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.rewards import hpsv3, qwen_vl, unifiedreward, videoreward
from tests.support import tiny_vl
from tests.unit.rewards.test_preprocessing import to_pillow

PROMPTS = ["a red square", "two {blue} circles", "a red square"]


@pytest.fixture(scope="module")
def images() -> Tensor:
    coarse = torch.rand(3, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.interpolate(coarse, (80, 64), mode="bicubic").clamp(0, 1)


def score(images: Tensor, prompts: list[str] = PROMPTS, **config: Any) -> Tensor:
    return rewards.load([RewardConfig(**config)], "cpu").score(images, prompts)


def asked(processor: Any, image: Any, text: str, size: tuple[int, int]) -> Any:
    """The published way: the picture resized by Pillow, then everything by the processor of the checkpoint."""
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    template = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return processor(text=[template], images=[image.resize(size[::-1], resample=3)], return_tensors="pt")


@pytest.fixture(scope="module")
def hpsv3_parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder, base = tmp_path_factory.mktemp("hpsv3"), tmp_path_factory.mktemp("qwen2vl")
    return folder, base, tiny_vl.build_hpsv3(folder, base)


@torch.no_grad()
def test_hpsv3_is_the_published_network_one_image_at_a_time(
    hpsv3_parts: tuple[Path, Path, Any], images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, base, (model, head, processor) = hpsv3_parts
    monkeypatch.setattr(hpsv3, "AREA", 9 * 28 * 28)
    monkeypatch.setattr(qwen_vl, "DTYPE", torch.float32)  # bfloat16 differs with the number of images
    question = hpsv3.HPSv3.QUESTION.read_text()
    assert question.endswith("\n\n\n\nPlease provide the overall ratings of this image: <|Reward|>\n\nEND\n")
    expected, two_dimensional = [], []
    for image, prompt in zip(images, PROMPTS, strict=True):
        given = asked(processor, to_pillow(image), question.replace("{prompt}", prompt), (112, 84))
        # As published: embeddings are put together first, and the language model gets no positions.
        embedded = model.model.language_model.embed_tokens(given.input_ids)
        seen = torch.cat(model.model.get_image_features(given.pixel_values, given.image_grid_thw).pooler_output)
        embedded[given.input_ids == model.config.image_token_id] = seen.to(embedded.dtype)
        hidden = model.model.language_model(inputs_embeds=embedded).last_hidden_state
        place = given.input_ids == processor.tokenizer.convert_tokens_to_ids("<|Reward|>")
        expected.append(head(hidden[place].float())[0, 0].item())
        other = model.model(**given).last_hidden_state
        two_dimensional.append(head(other[place].float())[0, 0].item())
    found = score(images, kind="hpsv3", path=str(folder), base=str(base))
    assert found.tolist() == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.05
    assert max(abs(a - b) for a, b in zip(expected, two_dimensional, strict=True)) > 0.01  # positions matter
    alone = score(images[:1], PROMPTS[:1], kind="hpsv3", path=str(folder), base=str(base))
    assert alone.tolist() == pytest.approx(expected[:1], abs=1e-4)


def test_hpsv3_resizes_square_pictures_to_its_area(hpsv3_parts: tuple[Path, Path, Any]) -> None:
    folder, base, _ = hpsv3_parts
    reward = hpsv3.HPSv3(
        RewardConfig(kind="hpsv3", path=str(folder), base=str(base)), "cpu", keys=str, name="rewards[0]"
    )
    for side in (512, 1024):
        assert reward.inputs(torch.zeros(1, 3, side, side), "x")["image_grid_thw"].tolist() == [[1, 32, 32]]


def test_a_prompt_cannot_write_special_tokens(hpsv3_parts: tuple[Path, Path, Any], images: Tensor) -> None:
    folder, base, _ = hpsv3_parts
    prompts = ["a <|Reward|> and an <|image_pad|>", "x", "x"]
    assert score(images, prompts, kind="hpsv3", path=str(folder), base=str(base)).shape == (3,)


@pytest.mark.parametrize(
    ("config", "spoil", "said"),
    [
        ({"base": "{folder}"}, None, ["rewards[0].base", "config.json"]),
        ({}, lambda base: (base / "config.json").write_text('{"model_type": "bert"}'), ["rewards[0].base", "'bert'"]),
        ({}, lambda base: (base / "chat_template.jinja").unlink(), ["rewards[0].base", "chat template"]),
    ],
)
def test_a_wrong_base_of_hpsv3_is_named(
    hpsv3_parts: tuple[Path, Path, Any], tmp_path: Path, config: dict[str, str], spoil: Any, said: list[str]
) -> None:
    folder, base = hpsv3_parts[0], tmp_path / "base"
    shutil.copytree(hpsv3_parts[1], base)
    if spoil:
        spoil(base)
    named = {"path": str(folder), "base": str(base)} | {key: text.format(folder=folder) for key, text in config.items()}
    with pytest.raises(UserError) as refused:
        rewards.load([RewardConfig(kind="hpsv3", **named)], "cpu")
    assert all(each in str(refused.value) for each in said)


def test_a_damaged_file_of_hpsv3_is_named(hpsv3_parts: tuple[Path, Path, Any], tmp_path: Path) -> None:
    (tmp_path / hpsv3.FILE).write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"rewards\[0\]\.path.*HPSv3\.safetensors"):
        rewards.load([RewardConfig(kind="hpsv3", path=str(tmp_path), base=str(hpsv3_parts[1]))], "cpu")


@pytest.fixture(scope="module", params=list(unifiedreward.CLASSES))
def unified(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny_vl.build_unifiedreward(folder, request.param)
    return folder


def test_unifiedreward_is_the_mean_of_the_marks_that_it_writes(unified: Path, images: Tensor) -> None:
    assert score(images, kind="unifiedreward", path=str(unified)).tolist() == pytest.approx(
        [((2.5 + 4 + 1.75) / 3 - 1) / 4] * 3
    )


def test_unifiedreward_asks_with_the_inputs_of_its_processor(unified: Path, images: Tensor) -> None:
    processor = AutoProcessor.from_pretrained(unified)
    reward: Any = unifiedreward.UnifiedReward(
        RewardConfig(kind="unifiedreward", path=str(unified)), "cpu", keys=str, name="rewards[0]"
    )
    size = (84, 56) if processor.image_processor.patch_size == 14 else (64, 64)  # whole patches, two a side
    found = reward.inputs(images, "a text")
    for row, image in enumerate(images):
        expected = asked(processor, to_pillow(image), "a text", size)
        assert found["input_ids"][row].tolist() == expected.input_ids[0].tolist()
        count = len(expected.pixel_values)
        torch.testing.assert_close(found["pixel_values"][row * count : (row + 1) * count], expected.pixel_values)


@pytest.mark.parametrize(
    "text",
    ["", "Alignment Score (1-5): 3\nStyle Score (1-5): 2", "Alignment Score: 3, Coherence Score: 7, Style Score: 2"],
)
def test_an_answer_without_all_marks_is_an_error(unified: Path, text: str) -> None:
    reward: Any = unifiedreward.UnifiedReward(
        RewardConfig(kind="unifiedreward", path=str(unified)), "cpu", keys=str, name="rewards[0] (unifiedreward)"
    )
    with pytest.raises(RewardError, match=r"rewards\[0\] \(unifiedreward\).*a cat"):
        reward._score(text, "a cat")


def test_a_checkpoint_of_another_type_is_refused(hpsv3_parts: tuple[Path, Path, Any]) -> None:
    base = hpsv3_parts[1]
    (base / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"rewards\[0\]\.path.*'qwen2_vl'.*qwen3_vl"):
        rewards.load([RewardConfig(kind="unifiedreward", path=str(base))], "cpu")


def without(folder: Path, section: str) -> None:
    file = folder / "model_config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != section}))


VIDEO = {"count": 6, "combine": "together"}


@pytest.fixture(scope="module", params=[1, 3])
def videoreward_parts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Any]:
    folder, base = tmp_path_factory.mktemp("videoreward"), tmp_path_factory.mktemp("qwen2vl")
    return folder, base, tiny_vl.build_videoreward(folder, base, outputs=request.param)


@pytest.fixture(scope="module")
def films() -> Tensor:
    coarse = torch.rand(3, 3, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    return torch.nn.functional.interpolate(coarse, (11, 360, 416), mode="trilinear").clamp(0, 1)


@torch.no_grad()
def test_videoreward_is_the_sum_of_three_qualities_of_the_published_network(
    videoreward_parts: tuple[Path, Path, Any], films: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, base, (model, processor) = videoreward_parts
    monkeypatch.setattr(qwen_vl, "DTYPE", torch.float32)
    question, network = videoreward.VideoReward.QUESTION.read_text(), model.base_model.model
    expected = []
    for film, prompt in zip(films, PROMPTS, strict=True):
        frames = [film[:, at] for at in (0, 2, 4, 6, 8, 10)]
        size = (
            364,
            420,
        )  # whole patches of 28 nearest to 360 x 416, which is between the smallest and the largest area
        seen = torch.stack([torch.from_numpy(np.array(to_pillow(each).resize(size[::-1], 3))) for each in frames])
        chat = [
            {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question.format(prompt=prompt)}]}
        ]
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        kept = {"do_resize": False, "do_sample_frames": False}
        given = processor(text=[text], videos=[seen.permute(0, 3, 1, 2)], videos_kwargs=kept, return_tensors="pt")
        assert given.video_grid_thw.tolist() == [[3, 26, 30]]
        # As published: embeddings are put together first, the language model gets no positions, LoRA is not merged.
        embedded = network.model.language_model.embed_tokens(given.input_ids)
        found = torch.cat(
            network.model.get_video_features(given.pixel_values_videos, given.video_grid_thw).pooler_output
        )
        embedded[given.input_ids == network.config.video_token_id] = found
        outputs = network.rm_head(network.model.language_model(inputs_embeds=embedded).last_hidden_state)[0]
        places = [processor.tokenizer.convert_tokens_to_ids(f"<|{name}_reward|>") for name in ("VQ", "MQ", "TA")]
        values = [outputs[given.input_ids[0] == token][0] for token in places]
        raw = [value[n if len(value) == 3 else 0].item() for n, value in enumerate(values)]
        expected.append((raw[0] - 3) / 2 + (raw[1] - 1) / 0.5 + (raw[2] + 2) / 4)
    wanted = {"kind": "videoreward", "path": str(folder), "base": str(base), "frames": VIDEO}
    assert score(films, **wanted).tolist() == pytest.approx(expected, abs=2e-3)
    assert max(expected) - min(expected) > 0.05
    assert score(films[:1], PROMPTS[:1], **wanted).tolist() == pytest.approx(expected[:1], abs=2e-3)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: shutil.rmtree(folder / "checkpoint-200"), ["rewards[0].path", "model.pth"]),
        (
            lambda folder: [(folder / f"checkpoint-{n}").rename(folder / f"checkpoint-{n}x") for n in (9, 200)],
            ["rewards[0].path", "checkpoint-NUMBER/model.pth", "copy it there"],
        ),
        (lambda folder: (folder / "checkpoint-200" / "model.pth").write_bytes(b"x"), ["rewards[0].path", "model.pth"]),
        (lambda folder: (folder / "model_config.json").write_text("{}"), ["rewards[0].path", "max_frame_pixels"]),
        (lambda folder: without(folder, "inference_config"), ["rewards[0].path", "inference_config.VQ_mean"]),
        (lambda folder: without(folder, "peft_lora_config"), ["rewards[0].path", "model.pth", "lora_alpha"]),
        (lambda folder: (folder / "model_config.json").unlink(), ["rewards[0].path", "model_config.json"]),
    ],
)
def test_a_wrong_checkpoint_of_videoreward_is_named(
    videoreward_parts: tuple[Path, Path, Any], tmp_path: Path, spoil: Any, said: list[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(videoreward_parts[0], folder)
    spoil(folder)
    with pytest.raises(UserError) as refused:
        rewards.load(
            [RewardConfig(kind="videoreward", path=str(folder), base=str(videoreward_parts[1]), frames=VIDEO)], "cpu"
        )
    assert all(each in str(refused.value) for each in said)
