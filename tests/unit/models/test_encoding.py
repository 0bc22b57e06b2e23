"""Batches of texts: an embedding depends on its text and on the batch's shape, not on its neighbours."""

from __future__ import annotations

import pytest
import torch

from solrl_ray import models
from solrl_ray.models.base import DiffusionModel
from tests.support import families, tiny

SHORT, OTHER, LONG = "a red square", "two blue circles", "o" * 600
"""The last fills every limit of tokens, so that none of its row is padding."""


@pytest.fixture(
    scope="module", params=[*(name for name in families.BUILDERS if name != "qwen_image_edit"), "sd3 without t5"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    folder = tmp_path_factory.mktemp("model") / "pipeline"
    if request.param == "sd3 without t5":
        family, path = "sd3", tiny.build_sd3(folder, t5=False)
    else:
        family, path = request.param, families.BUILDERS[request.param](folder)
    longest = {"qwen_image": 240, "wan21_i2v": 512}.get(family, tiny.T5_TOKENS)
    config = families.model_config(family, path, max_sequence_length=longest)
    return models.load(config, "cpu", components=models.encoder_components(config))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_embedding_does_not_depend_on_its_neighbours(model: DiffusionModel) -> None:
    batches = (
        [SHORT],
        [SHORT, OTHER, LONG],
        [OTHER, SHORT, SHORT],
        [LONG, LONG, SHORT],
        [LONG, OTHER, LONG, SHORT, OTHER],  # a second batch of two
    )
    made: dict[str, list[dict[str, torch.Tensor]]] = {}
    for texts in [*batches, [LONG], [LONG, LONG, LONG]]:
        for text, embedding in zip(texts, model.encode(texts, micro_batch=3), strict=True):
            made.setdefault(text, []).append(embedding)
    for text, embeddings in made.items():
        assert all(equal(embedding, embeddings[0]) for embedding in embeddings), text
    assert not equal(made[SHORT][0], made[OTHER][0])


def test_a_batch_gives_what_each_text_gives_alone(model: DiffusionModel) -> None:
    """Up to rounding: kernels differ between shapes."""
    texts = [SHORT, LONG, OTHER]
    for alone, together in zip(model.encode(texts), model.encode(texts, micro_batch=2), strict=True):
        assert alone.keys() == together.keys()
        for name, tensor in alone.items():
            assert tensor.dtype == together[name].dtype
            torch.testing.assert_close(together[name], tensor, atol=1e-5, rtol=1e-4)


def test_a_row_holds_no_more_memory_than_its_own(model: DiffusionModel) -> None:
    for embedding in model.encode([SHORT, OTHER], micro_batch=2):
        for tensor in embedding.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_the_identity_names_a_micro_batch_of_several(model: DiffusionModel) -> None:
    one, three = model.text_identity(), model.text_identity(3)
    assert "micro_batch" not in one  # embeddings that were made before there were batches stay valid
    assert three == one | {"micro_batch": "3"}


def test_the_rows_of_a_batch_are_as_many_whatever_is_asked_for(
    model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    encode = model._encode

    def counted(pipeline: object, texts: list[str]) -> dict[str, torch.Tensor]:
        rows.append(len(texts))
        return encode(pipeline, texts)

    monkeypatch.setattr(model, "_encode", counted)
    assert len(model.encode([SHORT] * 5, micro_batch=4)) == 5
    assert len(set(rows)) == 1
    assert len(rows) == 2
    assert model.encode([], micro_batch=4) == []
