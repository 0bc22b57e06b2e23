"""Rewards that see the reference pictures of prompts."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers import CLIPModel

from solrl_ray import rewards
from solrl_ray.config import own_functions
from solrl_ray.config.rewards import JudgeConfig, Question, Remote, RewardConfig
from solrl_ray.config.schema import EvaluationConfig
from solrl_ray.errors import RewardError
from solrl_ray.records import REFERENCES, Address, PromptEmbedding, SampleShape
from solrl_ray.rewards import trial
from solrl_ray.rewards.callables import real_pictures
from solrl_ray.rewards.clip import CLIPEdit
from solrl_ray.rollout.sampler import references_for
from tests.support.chat_server import Asked, serving
from tests.support.editing import picture
from tests.support.http_server import Quiet, listening

PROMPTS = ["a red square", "two blue circles"]
OWN = """
import torch

def first(images, prompts, reference):
    assert reference.dtype == torch.float32
    return (images - reference).abs().mean(dim=(1, 2, 3))

def all_of_them(images, prompts, references=None):
    return [0.0] * len(images) if references is None else references.amax(dim=(1, 2, 3, 4))

def both(images, prompts, *, reference, references):
    assert torch.equal(reference, references[:, 0])
    reference.zero_()
    return images.mean(dim=(1, 2, 3))

def elsewhere(images, prompts, reference=0.5):
    return [reference] * len(images)

def plain(images, prompts):
    return images[:, 0].mean(dim=(1, 2))
"""


def images(count: int = 2, side: int = 8) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def pictures(count: int = 2, side: int = 8) -> Tensor:
    """[2, count, 3, side, side] in whole 255ths."""
    whole = torch.randint(0, 256, (2, count, 3, side, side), generator=torch.Generator().manual_seed(1))
    return whole.float() / 255


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], rewards.RewardMixture]:
    (tmp_path / "mine.py").write_text(OWN)
    return lambda name: rewards.load([RewardConfig(kind=f"{tmp_path}/mine.py:{name}")], "cpu")


def test_a_function_gets_what_its_parameters_name(own: Callable[[str], rewards.RewardMixture]) -> None:
    made, seen = images(), pictures()
    expected = (made - seen[:, 0]).abs().mean(dim=(1, 2, 3))
    torch.testing.assert_close(own("first").score(made, PROMPTS, seen), expected)
    assert own("all_of_them").score(made, PROMPTS, seen).tolist() == seen.amax(dim=(1, 2, 3, 4)).tolist()
    before = seen.clone()
    own("both").score(made, PROMPTS, seen)
    assert torch.equal(seen, before)  # a function has a copy of its own
    assert own("plain").score(made, PROMPTS, seen).tolist() == own("plain").score(made, PROMPTS).tolist()


def test_without_references_a_function_gets_its_default_or_none(own: Callable[[str], rewards.RewardMixture]) -> None:
    assert own("all_of_them").score(images(), PROMPTS).tolist() == [0, 0]
    assert own("elsewhere").score(images(), PROMPTS).tolist() == [0.5, 0.5]  # its own meaning of the word
    with pytest.raises(RewardError, match=r"mine\.py:first\) failed"):
        own("first").score(images(), PROMPTS)


def test_a_sum_gives_them_to_those_that_want_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    entries = [RewardConfig(kind=f"{tmp_path}/mine.py:{name}", weight=2) for name in ("first", "plain")]
    made, seen = images(), pictures()
    columns = rewards.load(entries, "cpu").score_each(made, PROMPTS, seen)
    torch.testing.assert_close(columns[:, 1], (made - seen[:, 0]).abs().mean(dim=(1, 2, 3)))
    torch.testing.assert_close(columns[:, 2], made[:, 0].mean(dim=(1, 2)))
    torch.testing.assert_close(columns[:, 0], 2 * columns[:, 1] + 2 * columns[:, 2])


def test_a_function_is_tried_with_the_prompts_own_references(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    files = []
    for seed in (0, 1):
        picture(seed, 8).save(tmp_path / f"{seed}.png")
        files.append(((tmp_path / f"{seed}.png").read_bytes(),))
    config = RewardConfig(kind=f"{tmp_path}/mine.py:all_of_them")
    (scores,) = trial.here(
        [own_functions.Trial("rewards.0.kind", config, (SampleShape(8, 8),), ("a", "b"), tuple(files))], "cpu"
    )
    assert scores == pytest.approx([np.asarray(picture(seed, 8)).max() / 255 for seed in (0, 1)])


DRAWS = """
def darker(prompt, address, reference):
    reference /= 2  # a copy of its own
    return reference

def means(prompt, address, references=None):
    return references.mean(dim=0)

def alone(prompt, address, reference):
    import torch
    assert reference is None
    return torch.zeros(3, 8, 8)
"""


def test_what_draws_real_pictures_gets_the_references_that_its_parameters_name(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    where, shown = [Address(run_seed=0, purpose="t", index=n) for n in (0, 1)], pictures()[0]

    def drawn(name: str, references: Tensor | None) -> Tensor:
        config = EvaluationConfig(reference=f"{tmp_path}/draws.py:{name}")
        return real_pictures(config, "evaluation.reference", "a", where, references)

    torch.testing.assert_close(drawn("darker", shown), torch.stack([shown[0] / 2] * 2))
    torch.testing.assert_close(drawn("means", shown), torch.stack([(shown[0] + shown[1]) / 2] * 2))
    assert drawn("alone", None).shape == (2, 3, 8, 8)


def test_clip_edit_adds_the_weighted_cosine_with_the_reference(tiny_clip: Path) -> None:
    made, seen = images(side=40), pictures(1, side=40)
    model = CLIPModel.from_pretrained(tiny_clip).eval()
    text = rewards.load([RewardConfig(kind="clipscore", path=str(tiny_clip))], "cpu").score(made, PROMPTS)
    reward = rewards.load([RewardConfig(kind="clip_edit", path=str(tiny_clip), reference_weight=0.3)], "cpu")
    clip = reward._rewards[0].reward
    assert isinstance(clip, CLIPEdit)
    pixels = clip._preprocessing
    with torch.no_grad():
        sides = [model.get_image_features(pixel_values=pixels(each)).pooler_output for each in (made, seen[:, 0])]
    kept = functional.cosine_similarity(*sides)
    torch.testing.assert_close(reward.score(made, PROMPTS, seen), text + 0.3 * kept, atol=1e-5, rtol=0)
    assert kept.max() < 0.9999
    unchanged = reward.score(seen[:, 0], PROMPTS, seen)
    text = rewards.load([RewardConfig(kind="clipscore", path=str(tiny_clip))], "cpu").score(seen[:, 0], PROMPTS)
    torch.testing.assert_close(unchanged, text + 0.3, atol=1e-5, rtol=0)
    with pytest.raises(RewardError, match="needs a reference"):
        reward.score(made, PROMPTS)


def test_clip_edit_encodes_a_reference_that_images_share_once(tiny_clip: Path) -> None:
    made, seen = torch.rand(3, 3, 40, 40, generator=torch.Generator().manual_seed(5)), pictures(1, side=40)[:1]
    reward = rewards.load([RewardConfig(kind="clip_edit", path=str(tiny_clip), reference_weight=0.3)], "cpu")
    encoded = list[int]()
    clip = reward._rewards[0].reward
    assert isinstance(clip, CLIPEdit)
    clip._model.vision_model.register_forward_pre_hook(
        lambda module, args, kwargs: encoded.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    shared, copied = (
        reward.score(made, ["a"] * 3, each) for each in (seen.expand(3, 1, 3, 40, 40), seen.repeat(3, 1, 1, 1, 1))
    )
    assert encoded == [3, 1, 3, 3]
    torch.testing.assert_close(shared, copied, atol=1e-6, rtol=0)


def test_a_judge_sees_each_prompts_references_before_the_picture() -> None:
    question = Question(text='From 0 to 10: "{prompt}"?', references=True)
    made, seen = images(), pictures(2)
    with serving(lambda asked: "5") as server:
        entry = RewardConfig(kind="judge", judge=JudgeConfig(url=server.url, model="eyes", question=question))
        rewards.load([entry], "cpu").score(made, PROMPTS, seen)
        by_text = {asked.text: asked for asked in server.asked}
    for row, prompt in enumerate(PROMPTS):
        asked: Asked = by_text[f'From 0 to 10: "{prompt}"?']
        wanted = [*seen[row], made[row]]
        assert [found.shape for found in asked.pictures] == [(8, 8, 3)] * 3
        for found, expected in zip(asked.pictures, wanted, strict=True):
            assert np.array_equal(found, (expected.permute(1, 2, 0) * 255).round().byte().numpy())


def test_a_server_gets_them_only_if_it_is_to(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    class Handler(Quiet):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.read()))
            self.answer(b'{"scores": [1, 2]}')

    seen = pictures(1)[:1].expand(2, 1, 3, 8, 8)  # one prompt for all
    with listening(Handler) as url:
        for wants in (True, False):
            remote = Remote(url=f"{url}/score", references=wants)
            rewards.load([RewardConfig(kind="remote", remote=remote)], "cpu").score(images(), PROMPTS, seen)
    with_them, without = bodies
    assert "references" not in without
    assert [len(row) for row in with_them["references"]] == [1, 1]
    found = Image.open(io.BytesIO(base64.b64decode(with_them["references"][1][0])))
    assert np.array_equal(np.asarray(found), (seen[0, 0].permute(1, 2, 0) * 255).round().byte().numpy())


def test_all_samples_of_a_prompt_share_one_copy() -> None:
    whole = (pictures()[0] * 255).round().byte()
    embedding = PromptEmbedding(prompt_id="p", tensors={REFERENCES: whole}, digest="")
    found = references_for(images(5), embedding)
    assert found is not None
    assert found.shape == (5, 2, 3, 8, 8)
    assert found.stride(0) == 0
    assert torch.equal(found[3], whole.float() / 255)
    assert references_for(images(), PromptEmbedding(prompt_id="p", tensors={}, digest="")) is None
