"""An encoder on a tiny checkpoint: what it answers, before and after its text encoders have left."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.workers.card import GpuProcess
from actors.workers.text_encoder import TextEncoder
from solrl_ray import models
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.gpu.shared_model import SharedModel
from solrl_ray.models.base import DiffusionModel
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.prompts.encoding import encode_prompts
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.prompts.references import contents
from solrl_ray.records import Prompt
from tests.support import tiny
from tests.support.documents import ROOT
from tests.support.editing import write_prompts

PROMPTS = [Prompt(id="1", text="a red square"), Prompt(id="2", text="two blue circles"), Prompt(id="3", text="a dog")]


def config_of(path: Path, *overrides: str) -> Config:
    config = load([ROOT / "configs" / "demo.yaml"], overrides)
    return config.model_copy(update={"model": tiny.model_config(path)})


def test_it_encodes_the_files_that_it_is_sent_and_needs_no_others(tmp_path: Path, own_threads: None) -> None:
    checkpoint = tiny.build_kontext(tmp_path / "pipeline")
    fields = {"family": "flux_kontext", "references": 1}
    config = load([ROOT / "configs" / "demo.yaml"]).model_copy(
        update={"model": tiny.model_config(checkpoint, **fields)}
    )
    prompts = read_prompts(str(write_prompts(tmp_path / "p.jsonl", ["a", "b"], 40)))
    encoder, model = TextEncoder(config), models.load(config.model, "cpu", components={"text", "vae"})
    expected, files = encode_prompts(model, prompts), [contents(prompt) for prompt in prompts]
    for prompt in prompts:
        Path(prompt.references[0].path).unlink()
    encoder.start()
    made = encoder.embed(prompts, files)
    assert [each.digest for each in made] == [embedding_digest(tensors) for tensors in expected]
    assert made[0].references is not None
    assert made[0].references.shape == (1, 3, tiny.RESOLUTION, tiny.RESOLUTION)
    assert made[0].digest != made[1].digest


class Noting(TextEncoder):
    """Knows which models that it has loaded are in memory."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.made: list[weakref.ref[DiffusionModel]] = []

    def _load(self) -> DiffusionModel:
        model = models.load(self._config.model, "cpu", components={"text"})
        self.made.append(weakref.ref(model))
        return model

    @property
    def living(self) -> int:
        gc.collect()
        return sum(each() is not None for each in self.made)


@pytest.mark.parametrize("size", [1, 2])
def test_it_answers_what_its_model_encodes_in_micro_batches(tiny_pipeline: Path, size: int, own_threads: None) -> None:
    config = config_of(tiny_pipeline, f"fleet.encoders.micro_batch={size}")
    encoder, model = TextEncoder(config), models.load(config.model, "cpu", components={"text"})
    assert encoder.start() == model.text_identity(size)
    answers = encoder.embed(PROMPTS)
    expected = model.encode([prompt.text for prompt in PROMPTS], size)
    assert [each.prompt_id for each in answers] == ["1", "2", "3"]
    assert [each.digest for each in answers] == [embedding_digest(tensors) for tensors in expected]
    assert all(embedding_digest(each.tensors) == each.digest for each in answers)


def test_text_encoders_that_left_are_no_longer_in_memory_and_come_back_the_same(tiny_pipeline: Path) -> None:
    encoder = Noting(config_of(tiny_pipeline))
    assert not encoder.made
    encoder.start()
    before = [each.digest for each in encoder.embed(PROMPTS)]
    assert (len(encoder.made), encoder.living) == (1, 1)
    encoder.leave()
    encoder.leave()  # as for an encoder that had nothing to do since
    assert encoder.living == 0
    assert [each.digest for each in encoder.embed(PROMPTS)] == before
    assert len(encoder.made) == 2


def test_on_a_card_it_makes_room_before_it_loads_and_whenever_it_encodes(tiny_pipeline: Path) -> None:
    said: list[str] = []

    class Model:
        def bring_weights_for(self, role: str) -> None:
            said.append(f"{role} with {encoder.living} models")

    model: Any = Model()
    encoder = Noting(config_of(tiny_pipeline))
    encoder.share(model)
    encoder.start()
    encoder.embed(PROMPTS[:1])
    assert said == ["encoder with 0 models", "encoder with 1 models"]


def test_it_is_a_role_of_a_card(tiny_pipeline: Path) -> None:
    config = config_of(tiny_pipeline)
    card = GpuProcess("card-0", config)
    card.host("encoder-0", Noting, config)
    card.call_as("encoder-0", "start")
    answered = card.call_as("encoder-0", "embed", PROMPTS)
    assert [each.prompt_id for each in answered] == ["1", "2", "3"]
    encoder = card._roles["encoder-0"]
    assert encoder.living == 1
    card.dismiss("encoder-0")
    assert encoder.living == 0


@pytest.mark.parametrize("broken", ["__init__", "share"])
def test_a_role_that_could_not_be_made_says_why_when_it_is_called(tiny_pipeline: Path, broken: str) -> None:
    def fails(*_: Any) -> None:
        raise UserError(f"{broken} found no weights")

    card = GpuProcess("card-0", config_of(tiny_pipeline))
    card.host("encoder-0", type("Broken", (Noting,), {broken: fails}), config_of(tiny_pipeline))
    for _ in range(2):
        with pytest.raises(UserError, match=f"^{broken} found no weights$"):
            card.call_as("encoder-0", "start")
    card.dismiss("encoder-0")
    with pytest.raises(RunError, match="after it has left"):
        card.call_as("encoder-0", "start")


def test_it_is_away_before_another_role_loads_and_comes_back_to_encode(tiny_pipeline: Path) -> None:
    config = config_of(tiny_pipeline)
    shared, encoder = SharedModel(config), Noting(config)
    encoder.share(shared)
    encoder.start()
    before = [each.digest for each in encoder.embed(PROMPTS)]
    assert encoder.living == 1
    shared.load(torch.device("cpu"), {"transformer"})
    assert encoder.living == 0
    assert [each.digest for each in encoder.embed(PROMPTS)] == before
