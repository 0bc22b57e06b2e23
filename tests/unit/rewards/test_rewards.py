"""CLIPScore against transformers itself, the checks around every reward, and mixtures."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

from solrl_ray import rewards
from solrl_ray.config import reward_kinds
from solrl_ray.config.loading import read_file
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.rewards.base import Reward
from solrl_ray.rewards.clip import CLIPScore
from solrl_ray.rewards.mixture import RewardMixture, Weighted
from solrl_ray.rewards.preprocessing import Preprocessing
from tests.support import tiny

CONFIGS = Path(__file__).parents[3] / "configs" / "rewards"
PROMPTS = ["a red square", "two blue circles", "a red square"]


def pictures(count: int, height: int = 16, width: int = 16, seed: int = 0) -> Tensor:
    """Smooth random pictures whose channels are exact 8-bit values."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    return (smooth * 255).round() / 255


def load_clip(path: Path) -> CLIPScore:
    config = RewardConfig(kind="clipscore", path=str(path))
    reward = CLIPScore(config, "cpu", keys=lambda field: f"rewards[0].{field}", name="rewards[0] (clipscore)")
    assert isinstance(reward, CLIPScore)
    return reward


# --- CLIPScore


def test_clipscore_is_the_stock_logit_without_its_scale(tiny_clip: Path) -> None:
    images = pictures(3)
    model = CLIPModel.from_pretrained(tiny_clip).eval()
    processor = CLIPImageProcessor.from_pretrained(tiny_clip)
    tokenizer = CLIPTokenizer.from_pretrained(tiny_clip)
    arrays = [(image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8) for image in images]
    with torch.no_grad():
        output = model(
            pixel_values=processor(arrays, return_tensors="pt").pixel_values,
            **tokenizer(PROMPTS, padding=True, return_tensors="pt"),
        )
    expected = (output.logits_per_image / model.logit_scale.exp()).diagonal()
    scores = load_clip(tiny_clip).score(images, PROMPTS)
    assert scores.dtype == torch.float32
    assert expected.std() > 1e-3
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


def test_a_score_is_a_function_of_its_batch_and_not_of_what_was_scored_before(tiny_clip: Path) -> None:
    fresh, used = load_clip(tiny_clip), load_clip(tiny_clip)
    used.score(pictures(5, seed=9), ["another prompt", *PROMPTS, "one more"])
    assert torch.equal(fresh.score(pictures(3), PROMPTS), used.score(pictures(3), PROMPTS))


def test_a_prompt_that_is_too_long_is_cut_and_counted(tiny_clip: Path) -> None:
    reward = load_clip(tiny_clip)
    scores = reward.score(pictures(1).expand(2, -1, -1, -1), ["7" * 40, "7" * (tiny.CLIP_TOKENS - 2)])
    assert torch.equal(scores[0], scores[1])
    assert reward._texts.truncated == 1


def test_a_bfloat16_checkpoint_is_scored_in_float32(tiny_clip: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_clip, tmp_path / "half")
    CLIPModel.from_pretrained(tiny_clip, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    reward = load_clip(tmp_path / "half")
    assert {parameter.dtype for parameter in reward._model.parameters()} == {torch.float32}
    assert not reward._model.training


@pytest.mark.parametrize("file", ["model.safetensors", "preprocessor_config.json", "tokenizer.json"])
def test_an_incomplete_checkpoint_is_refused(tiny_clip: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(tiny_clip, tmp_path / "clip")
    (tmp_path / "clip" / file).unlink()
    with pytest.raises(UserError, match=r"^rewards\[0\]\.path is .* cannot be read"):
        rewards.load([RewardConfig(kind="clipscore", path=str(tmp_path / "clip"))], "cpu")


def test_what_is_no_clip_is_refused(tiny_pipeline: Path) -> None:
    other = str(tiny_pipeline / "text_encoder_2")  # a T5
    for path in (other, "/no/such/clip", "nested/no/clip"):
        with pytest.raises(UserError, match=r"^rewards\[1\]\.path is ") as refused:
            rewards.load([RewardConfig(kind="os:getcwd"), RewardConfig(kind="clipscore", path=path)], "cpu")
        assert ("'t5'" in str(refused.value)) == (path == other)


# --- preprocessing


def test_preprocessing_reads_the_settings_of_published_checkpoints() -> None:
    # The file of openai/clip-vit-base-patch32 states sizes as plain numbers.
    published = {"crop_size": 224, "size": 224, "do_resize": True, "resample": 3, "do_normalize": True}
    read = Preprocessing.from_config(published)
    assert (read.size, read.crop, read.interpolation) == (224, (224, 224), "bicubic")
    assert read.mean == (0.48145466, 0.4578275, 0.40821073)
    square = Preprocessing.from_config({"size": {"height": 20, "width": 30}, "do_center_crop": False})
    assert (square.size, square.crop) == ((20, 30), None)
    assert square(pictures(1)).shape == (1, 3, 20, 30)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"resample": 1}, "resample 1 is neither"),
        ({"do_rescale": False}, "rescaled from 0…255"),
        ({"size": {"longest_edge": 9}}, "neither 'shortest_edge'"),
    ],
)
def test_settings_that_are_not_supported_are_refused(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocessing.from_config(setting)


def test_bright_edges_do_not_overshoot_when_resized() -> None:
    edges = torch.zeros(1, 3, 32, 32)
    edges[..., 16:] = 1.0
    plain = Preprocessing(size=12, crop=None, mean=(0, 0, 0), std=(1, 1, 1))
    resized = plain(edges)
    assert resized.min() == 0.0
    assert resized.max() == 1.0


# --- every reward


class Fixed(Reward):
    """Gives back what it was made with."""

    def __init__(self, values: Sequence[float] | Tensor, name: str = "rewards[0] (fixed)") -> None:
        super().__init__(name)
        self.values = torch.as_tensor(values)

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.values


@pytest.mark.parametrize("values", [[1.0, 2.0], [[1.0], [2.0], [3.0]], 1.0])
def test_the_wrong_number_of_values_is_a_reward_error(values: list[float]) -> None:
    with pytest.raises(RewardError, match=r"^Reward rewards\[0\] \(fixed\) .*shape .* 3 images"):
        Fixed(values).score(pictures(3), PROMPTS)
    with pytest.raises(ValueError, match=r"\(3, 3, 16, 16\) and 2 prompts"):
        Fixed(values).score(pictures(3), PROMPTS[:2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_a_reward_error_naming_reward_and_prompt(value: float) -> None:
    with pytest.raises(
        RewardError, match=r"^Reward rewards\[0\] \(fixed\) .*(nan|inf) for 1 of 3 .*'two blue circles'"
    ):
        Fixed([0.0, value, 1.0]).score(pictures(3), PROMPTS)


# --- mixtures and functions of the user


def test_a_mixture_is_the_weighted_sum() -> None:
    first = Fixed([1.0, 2.0, 3.0], "a")
    second = Fixed(torch.tensor([4.0, 0.0, -1.0], dtype=torch.float64), "b")
    mixture = RewardMixture([Weighted(first, 0.5), Weighted(second, 2.0)])
    scores = mixture.score(pictures(3), PROMPTS)
    assert (scores.tolist(), scores.dtype) == ([8.5, 1.0, -0.5], torch.float32)
    assert {n: v.tolist() for n, v in mixture.components(pictures(3), PROMPTS).items()} == {
        "a": [1.0, 2.0, 3.0],
        "b": [4.0, 0.0, -1.0],
    }
    assert mixture.score_each(pictures(3), PROMPTS).T.tolist() == [[8.5, 1, -0.5], [1, 2, 3], [4, 0, -1]]
    assert first.score_each(pictures(3), PROMPTS).T.tolist() == [[1, 2, 3], [1, 2, 3]]


def test_the_costs_of_a_mixture_are_those_of_all_its_members_once() -> None:
    class Costly(Fixed):
        requests = 2

        def take_costs(self) -> dict[str, int]:
            taken, self.requests = self.requests, 0
            return {"requests": taken} if taken else {}

    members = [Costly([1.0], "a"), Costly([1.0], "b"), Fixed([1.0], "c")]
    mixture = RewardMixture([Weighted(member, 1.0) for member in members])
    assert mixture.take_costs() == {"requests": 4}
    assert mixture.take_costs() == {}


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the module `tried_rewards` where it can be imported."""

    def write(source: str) -> None:
        (tmp_path / "tried_rewards.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "tried_rewards", raising=False)

    return write


def test_a_function_of_the_user_is_a_reward(user_module: Callable[[str], None], tiny_clip: Path) -> None:
    user_module("def redness(images, prompts):\n    return images[:, 0].mean(dim=(1, 2)) + len(prompts)\n")
    mixture = rewards.load(
        [
            RewardConfig(kind="tried_rewards:redness", weight=2.0),
            RewardConfig(kind="clipscore", path=str(tiny_clip), weight=0.25),
        ],
        "cpu",
    )
    images = pictures(3)
    expected = 2.0 * (images[:, 0].mean(dim=(1, 2)) + 3) + 0.25 * load_clip(tiny_clip).score(images, PROMPTS)
    torch.testing.assert_close(mixture.score(images, PROMPTS), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no_such_module:f", r"^rewards\[0\]\.kind is 'no_such_module:f', but the module no_such_module is neither in"),
        ("os:no_such_function", r"^rewards\[0\]\.kind .* but os has no function no_such_function"),
        ("os:sep", r"os has no function sep"),
        (":f", r"not of the form 'module:function'"),
        (
            "clipscroe",
            r"^rewards\[0\]\.kind is 'clipscroe', which is neither a registered reward \(.*clipscore, .* did you "
            r"mean clipscore\?$",
        ),
        (
            "testbed_clip",
            r"'module:function'; it is the name of a preset, whose entry is in \S+/rewards/testbed_clip\.yaml\.$",
        ),
    ],
)
def test_a_kind_that_cannot_be_loaded_is_a_user_error(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rewards.load([RewardConfig(kind=kind)], "cpu")


def test_a_new_key_is_refused_unless_the_rewards_options_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wider(RewardConfig):
        target: float = 0.5

    given, keys = Wider(kind="clipscore", path="/x", target=0.2), "rewards.0.{}".format
    rewards.registered(Wider(kind="clipscore", path="/x"), keys)
    with pytest.raises(UserError, match=r"^rewards\.0\.target is .*clipscore"):
        rewards.registered(given, keys)
    clipscore = reward_kinds.REGISTERED["clipscore"]
    wider = dataclasses.replace(clipscore, options=clipscore.options | {"target"})
    monkeypatch.setitem(reward_kinds.REGISTERED, "clipscore", wider)
    rewards.registered(given, keys)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_reward_part_names_rewards_that_exist_and_options_that_they_read(file: Path) -> None:
    for entry in read_file(file)["rewards"]:
        if entry["kind"] == "ocr":
            pytest.importorskip("rapidocr", reason="the extra `ocr` is not installed")
        rewards.registered(RewardConfig.model_validate(entry), keys=str)
