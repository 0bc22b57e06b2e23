"""Registered rewards, loaded from tiny checkpoints in the published layout, against the published way to score."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import file_download
from PIL import Image
from torch import Tensor
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor
from torchvision.transforms import functional as tv
from transformers import CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from solrl_ray import rewards
from solrl_ray.config.rewards import Normalization, RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.records import SampleShape
from solrl_ray.rewards import aesthetic, hpsv2, imagereward
from solrl_ray.rewards.preprocessing import CLIP_MEAN, CLIP_STD
from tests.support import tiny_rewards
from tests.unit.rewards.test_preprocessing import to_pillow

PROMPTS = ["a red square", "two blue circles", "a red square"]


@pytest.fixture(scope="module", params=[(40, 40), (40, 72)], ids=str)
def images(request: pytest.FixtureRequest) -> Tensor:
    coarse = torch.rand(3, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.interpolate(coarse, request.param, mode="bicubic").clamp(0, 1)


@pytest.fixture(scope="module")
def pillow_images(images: Tensor) -> list[Image.Image]:
    return [to_pillow(image) for image in images]


def score(images: Tensor, **config: Any) -> Tensor:
    return rewards.load([RewardConfig(**config)], "cpu").score(images, PROMPTS)


def close(scores: Tensor, expected: list[float]) -> None:
    assert max(expected) - min(expected) > 1e-4, "the pictures must differ for the comparison to mean anything"
    torch.testing.assert_close(scores, torch.tensor(expected), atol=2e-5, rtol=1e-5)


# --- PickScore


@pytest.fixture(scope="module")
def pickscore(tiny_clip: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The published split: weights in one repository, tokenizer and image processor in another."""
    model, base = (tmp_path_factory.mktemp(name) for name in ("pickscore", "processor"))
    for file in tiny_clip.iterdir():
        shutil.copy(file, model if file.name in ("config.json", "model.safetensors") else base)
    return model, base


def test_pickscore_is_the_scaled_cosine_of_the_published_script(
    tiny_clip: Path, pickscore: tuple[Path, Path], images: Tensor, pillow_images: list[Image.Image]
) -> None:
    model = CLIPModel.from_pretrained(tiny_clip).eval()
    tokenizer, processor = CLIPTokenizer.from_pretrained(tiny_clip), CLIPImageProcessorPil.from_pretrained(tiny_clip)
    expected = []
    with torch.no_grad():
        for image, prompt in zip(pillow_images, PROMPTS, strict=True):
            words = tokenizer(prompt, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
            output = model(**words, pixel_values=processor(image, return_tensors="pt").pixel_values)
            expected.append(output.logits_per_image.item() / 26)
    close(score(images, kind="pickscore", path=str(pickscore[0]), base=str(pickscore[1])), expected)
    close(score(images, kind="pickscore", path=str(tiny_clip)), expected)


def test_clipscore_with_the_published_preprocessing(tiny_clip: Path, images: Tensor) -> None:
    model, tokenizer = CLIPModel.from_pretrained(tiny_clip).eval(), CLIPTokenizer.from_pretrained(tiny_clip)
    pixels = Compose([Resize(16), CenterCrop(16), Normalize(CLIP_MEAN, CLIP_STD)])(images)
    with torch.no_grad():
        output = model(**tokenizer(PROMPTS, padding=True, return_tensors="pt"), pixel_values=pixels)
    expected = (output.logits_per_image / model.logit_scale.exp()).diagonal().tolist()
    close(score(images, kind="clipscore", path=str(tiny_clip), preprocessing="torchvision"), expected)
    assert not torch.allclose(score(images, kind="clipscore", path=str(tiny_clip)), torch.tensor(expected), atol=1e-3)


# --- HPSv2


@pytest.mark.parametrize(("kind", "file"), [("hpsv2", "HPS_v2.1_compressed.pt"), ("hpsv2_v20", "HPS_v2_compressed.pt")])
def test_hpsv2_is_the_cosine_without_a_scale(
    kind: str,
    file: str,
    images: Tensor,
    pillow_images: list[Image.Image],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import open_clip

    model = tiny_rewards.build_hpsv2(tmp_path, file)
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: {"ViT-H-14": tiny_rewards.HPS_ARCHITECTURE}[name])
    expected = []
    with torch.no_grad():
        for image, prompt in zip(pillow_images, PROMPTS, strict=True):
            width, height = (round(side * 32 / max(image.size)) for side in image.size)
            resized = tv.resize(ToTensor()(image), [height, width], InterpolationMode.BICUBIC)
            across, down = 32 - width, 32 - height  # black on both sides
            padded = tv.pad(resized, [across // 2, down // 2, across - across // 2, down - down // 2])
            pixels = tv.normalize(padded, CLIP_MEAN, CLIP_STD)
            features = model.encode_image(pixels[None]), model.encode_text(open_clip.tokenize([prompt]))
            expected.append(torch.cosine_similarity(*features).item())
    close(score(images, kind=kind, path=str(tmp_path)), expected)


def test_the_text_of_a_prompt_is_encoded_once_and_cut_to_what_the_network_takes(
    tmp_path: Path, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    tiny_rewards.build_hpsv2(tmp_path, hpsv2.HPSv2.file)
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: tiny_rewards.HPS_ARCHITECTURE)
    reward = hpsv2.HPSv2(RewardConfig(kind="hpsv2", path=str(tmp_path)), "cpu", keys=str, name="hps")
    calls = []
    reward._model.token_embedding.register_forward_hook(lambda *_: calls.append(1))
    reward.score(images, PROMPTS)
    reward.score(images, PROMPTS[::-1])
    assert len(calls) == 2
    reward.score(images, ["red " * 75, "red " * 76, "red " * 76])
    assert reward._texts.truncated == 1


# --- ImageReward


@pytest.fixture(scope="module")
def imagereward_parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, tiny_rewards.ImageRewardParts]:
    folder, base = tmp_path_factory.mktemp("imagereward"), tmp_path_factory.mktemp("bert")
    return folder, base, tiny_rewards.build_imagereward(folder, base)


def test_imagereward_is_the_published_network_one_image_at_a_time(
    imagereward_parts: tuple[Path, Path, tiny_rewards.ImageRewardParts],
    images: Tensor,
    pillow_images: list[Image.Image],
) -> None:
    folder, base, parts = imagereward_parts
    published = Compose(
        [Resize(32, InterpolationMode.BICUBIC), CenterCrop(32), ToTensor(), Normalize(CLIP_MEAN, CLIP_STD)]
    )
    expected = [parts.score(published(image), prompt) for image, prompt in zip(pillow_images, PROMPTS, strict=True)]
    close(score(images, kind="imagereward", path=str(folder), base=str(base)), expected)


def test_imagereward_refuses_a_checkpoint_with_a_weight_missing_or_unknown(
    imagereward_parts: tuple[Path, Path, tiny_rewards.ImageRewardParts], tmp_path: Path
) -> None:
    folder, base, _ = imagereward_parts
    weights = torch.load(folder / imagereward.FILE)
    config = [RewardConfig(kind="imagereward", path=str(tmp_path), base=str(base))]
    cases = {
        "blip.visual_encoder.norm.bias": r"Missing key.*post_layernorm\.bias",
        "blip.visual_encoder.pos_embed": r"is not ImageReward's: KeyError 'pos_embed'",
    }
    for name, message in cases.items():
        torch.save({key: value for key, value in weights.items() if key != name}, tmp_path / imagereward.FILE)
        with pytest.raises(UserError, match=rf"^rewards\[0\]\.path is .*{message}"):
            rewards.load(config, "cpu")
    torch.save(weights | {"stranger": torch.zeros(1)}, tmp_path / imagereward.FILE)
    with pytest.raises(UserError, match="unknown weight 'stranger'"):
        rewards.load(config, "cpu")


# --- Aesthetic


def test_aesthetic_is_the_head_on_unit_features(
    tiny_clip: Path, tmp_path: Path, images: Tensor, pillow_images: list[Image.Image]
) -> None:
    head = tiny_rewards.build_aesthetic(tmp_path, features=24)
    model, processor = CLIPModel.from_pretrained(tiny_clip).eval(), CLIPImageProcessorPil.from_pretrained(tiny_clip)
    with torch.no_grad():
        pixels = processor(pillow_images, return_tensors="pt").pixel_values
        features = model.get_image_features(pixel_values=pixels).pooler_output
        expected = head(features / features.norm(dim=-1, keepdim=True))[:, 0]
    scores = score(images, kind="aesthetic", path=str(tmp_path), base=str(tiny_clip))
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-6)
    assert scores.std() > 1e-6


# --- what is refused before a run


def named(key: str) -> str:
    return f"{key} (run.yaml)"


def refusal(config: RewardConfig, resolution: int = 40) -> str:
    with pytest.raises(UserError) as caught:
        rewards.check([config], [SampleShape(resolution, resolution)], named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_that_are_absent_are_named_with_how_to_fetch_them(
    tiny_clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_download.constants, "HF_HUB_CACHE", str(tmp_path))
    absent = refusal(RewardConfig(kind="hpsv2", path="xswu/HPSv2"))
    assert absent.startswith("rewards.0.path (run.yaml) is 'xswu/HPSv2'")
    assert "`hf download xswu/HPSv2 HPS_v2.1_compressed.pt`" in absent
    assert "v2_compressed" in refusal(RewardConfig(kind="hpsv2_v20", path="xswu/HPSv2"))
    needed = "config.json model.safetensors tokenizer.json preprocessor_config.json"
    assert f"`hf download o/pick {needed}`" in refusal(RewardConfig(kind="pickscore", path="o/pick"))
    assert "HPS_v2.1_compressed.pt" in refusal(RewardConfig(kind="hpsv2", path=str(tmp_path)))
    on_no_hub = RewardConfig(kind="aesthetic", path=str(tmp_path), base=str(tiny_clip))
    assert aesthetic.SOURCE in refusal(on_no_hub)


def test_a_checkpoint_is_found_in_the_hugging_face_cache(
    tiny_clip: Path, tmp_path: Path, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--owner--clip" / "snapshots" / "0123abc"
    shutil.copytree(tiny_clip, snapshot)
    (tmp_path / "models--owner--clip" / "refs").mkdir()
    (tmp_path / "models--owner--clip" / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(file_download.constants, "HF_HUB_CACHE", str(tmp_path))
    config = RewardConfig(kind="pickscore", path="owner/clip")
    rewards.check([config], [SampleShape(40, 40)], named)
    assert torch.equal(
        score(images, kind="pickscore", path="owner/clip"), score(images, kind="pickscore", path=str(tiny_clip))
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"kind": "imagereward", "path": "/x"},
            "rewards.0.kind (run.yaml) is 'imagereward', but its entry lacks the key base; ",
        ),
        ({"kind": "hpsv2", "path": "/x", "base": "o/n"}, "rewards.0.base (run.yaml) is 'o/n', but the reward (hpsv2)"),
        (
            {"kind": "pickscore", "path": "/x", "preprocessing": "torchvision"},
            "rewards.0.preprocessing (run.yaml) is 'torchvision', but the reward (pickscore) does not read it",
        ),
        ({"kind": "math:sqrt", "base": "o/n"}, "rewards.0.base (run.yaml) is 'o/n', but a function (math:sqrt)"),
        ({"kind": "math:sqrt", "path": "/x"}, "rewards.0.path (run.yaml) is '/x', but a function (math:sqrt)"),
        ({"kind": "ocr", "path": "x"}, "rewards.0.path (run.yaml) is 'x', but the reward (ocr)"),
        ({"kind": "remote"}, "rewards.0.kind (run.yaml) is 'remote', but its entry lacks the key remote; "),
        ({"kind": "clipscore"}, "rewards.0.kind (run.yaml) is 'clipscore', but its entry lacks the key path; "),
    ],
)
def test_options_that_a_reward_does_not_read_or_needs_are_refused(config: dict[str, str], message: str) -> None:
    assert refusal(RewardConfig(**config)).startswith(message)


def test_a_reward_that_cannot_take_the_models_images_is_refused(tiny_clip: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_clip, tmp_path / "clip")
    settings = tmp_path / "clip" / "preprocessor_config.json"
    unresized = settings.read_text().replace('"do_resize": true', '"do_resize": false')
    settings.write_text(unresized)
    config = RewardConfig(kind="clipscore", path=str(tmp_path / "clip"))
    rewards.check([config], [SampleShape(16, 16)], named)
    assert "images of (12, 12) pixels are smaller than the crop (16, 16)" in refusal(config, resolution=12)
    settings.write_text(unresized.replace('"do_center_crop": true', '"do_center_crop": false'))
    assert refusal(config, resolution=40).endswith(
        "gives 40 x 40 pixels for the model's 40 x 40, but its network takes 16 x 16."
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x * 2 - 1, "values from -1 to "),
        (lambda x: x * 255, "values from 0 to 2"),
        (lambda x: x.where(x > 0.5, torch.nan), "values from nan to nan"),
        (lambda x: (x * 255).byte(), r"images of torch.uint8 and shape \[3, 3, 40, "),
        (lambda x: x[:, :, :0], r"shape \[3, 3, 0, "),
    ],
)
def test_images_of_the_wrong_range_are_refused(tiny_clip: Path, images: Tensor, change: Any, message: str) -> None:
    images = images.clone()
    images[0, 0, 0, 0] = 0
    with pytest.raises(RewardError, match=rf"rewards\[0\] \(clipscore\) got .*{message}.*expected"):
        score(change(images), kind="clipscore", path=str(tiny_clip))


# --- normalisation


def test_normalisation_is_a_fixed_scale_before_the_weight(tiny_clip: Path, images: Tensor) -> None:
    plain = score(images, kind="clipscore", path=str(tiny_clip))
    scale = Normalization(mean=0.2, std=0.05)
    mixture = rewards.load([RewardConfig(kind="clipscore", path=str(tiny_clip), weight=3.0, normalize=scale)], "cpu")
    (values,) = mixture.components(images, PROMPTS).values()
    assert torch.equal(values, plain)  # a component is on its published scale
    scaled = mixture.score(images, PROMPTS)
    torch.testing.assert_close(scaled, 3.0 * (plain - 0.2) / 0.05, atol=1e-5, rtol=1e-5)
    mixture.score(1 - images, PROMPTS)
    assert torch.equal(scaled, mixture.score(images, PROMPTS))  # nor does it depend on what else was scored


# --- published weights, where they are present


PUBLISHED = {
    "pickscore": ({"path": "yuvalkirstain/PickScore_v1", "base": "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"}, (0.5, 1.1)),
    "clipscore": ({"path": "openai/clip-vit-large-patch14", "preprocessing": "torchvision"}, (0.05, 0.4)),
    "hpsv2": ({"path": "xswu/HPSv2"}, (0.0, 0.45)),
    "hpsv2_v20": ({"path": "xswu/HPSv2"}, (0.0, 0.45)),
    "imagereward": ({"path": "zai-org/ImageReward", "base": "google-bert/bert-base-uncased"}, (-3.0, 2.5)),
}


@pytest.mark.weights
@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_weights_prefer_the_matching_prompt(kind: str) -> None:
    options, (low, high) = PUBLISHED[kind]
    config = RewardConfig(kind=kind, **options)
    try:
        rewards.check([config], [SampleShape(512, 512)], named)
    except UserError as error:
        pytest.skip(str(error))
    red = torch.zeros(2, 3, 512, 512)
    red[:, 0] = 0.9
    match, other = (
        rewards.load([config], "cpu").score(red, ["a plain red background", "a blue bird on a snowy branch"]).tolist()
    )
    assert low < other < match < high
