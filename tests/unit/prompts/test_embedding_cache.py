"""Embeddings on disk: what is written comes back, or is missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from solrl_ray.errors import RunError
from solrl_ray.prompts import embedding_cache
from solrl_ray.prompts.embedding_cache import EmbeddingCache, embedding_digest
from solrl_ray.prompts.prompt_set import prompt_id
from solrl_ray.records import Prompt, PromptEmbedding, Reference

IDENTITY = {"text_encoder": "one", "device": "cpu/1"}
SIZE = 1000
"""Values of an embedding, two bytes each."""


def prompts_of(*texts: str) -> list[Prompt]:
    return [Prompt(id=prompt_id(text), text=text) for text in texts]


def embedding_of(prompt: Prompt) -> PromptEmbedding:
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(len(prompt.text)))
    tensors = {"prompt_embeds": values.bfloat16(), "prompt_embeds_mask": torch.ones(4, dtype=torch.bool)}
    return PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=embedding_digest(tensors))


def written(folder: Path, *texts: str, identity: Mapping[str, str] = IDENTITY) -> EmbeddingCache:
    cache, prompts = EmbeddingCache(folder, identity), prompts_of(*texts)
    cache.write(prompts, [embedding_of(prompt) for prompt in prompts])
    return cache


def test_an_embedding_comes_back_as_it_was(tmp_path: Path) -> None:
    written(tmp_path / "new", "a cat", "a big dog")
    names = [path.name for path in (tmp_path / "new").iterdir()]
    assert len(names) == 2
    assert all(name.endswith(".safetensors") for name in names)
    (dog,) = prompts_of("a big dog")
    found = EmbeddingCache(tmp_path / "new", IDENTITY).read(dog)
    assert found is not None
    assert (found.prompt_id, found.digest) == (dog.id, embedding_of(dog).digest)
    for name, tensor in embedding_of(dog).tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_only_what_was_written_is_there(tmp_path: Path) -> None:
    cache, (cat, dog) = EmbeddingCache(tmp_path / "new", IDENTITY), prompts_of("a cat", "a big dog")
    assert cache.lacking([dog, cat]) == [dog, cat]
    written(tmp_path / "new", "a cat")
    assert cache.lacking([dog, cat]) == [dog]
    assert cache.read(dog) is None


def test_what_another_encoder_made_is_not_there(tmp_path: Path) -> None:
    written(tmp_path, "a cat")
    for change in ({"text_encoder": "two"}, {"micro_batch": "16"}, {"device": "cuda/NVIDIA H100"}):
        assert EmbeddingCache(tmp_path, IDENTITY | change).lacking(prompts_of("a cat"))


def test_an_embedding_is_of_a_text_and_the_bytes_of_its_pictures_wherever_they_are(tmp_path: Path) -> None:
    def seeing(*pictures: tuple[str, str]) -> Prompt:
        references = tuple(Reference(path=path, digest=digest) for path, digest in pictures)
        return Prompt(id=prompt_id("a cat", references), text="a cat", references=references)

    cache, made = EmbeddingCache(tmp_path, IDENTITY), seeing(("a.png", "aa"), ("b.png", "bb"))
    cache.write([made], [embedding_of(made)])
    moved = seeing(("elsewhere/a.png", "aa"), ("b.png", "bb"))
    others = [
        seeing(("a.png", "other bytes"), ("b.png", "bb")),
        seeing(("b.png", "bb"), ("a.png", "aa")),
        seeing(("a.png", "aa")),
        seeing(),
        *prompts_of("a cataabb"),
    ]
    assert cache.lacking([moved, *others]) == others
    assert cache.read(moved) is not None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no header", "of others"])
def test_a_damaged_file_is_removed_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    cache, (cat,) = written(tmp_path, "a cat"), prompts_of("a cat")
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(
        {
            "cut": content[:-10],
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
            "empty": b"",
            "no header": b"\x02\0\0\0\0\0\0\0{}",
            "of others": b"<html>",
        }[damage]
    )
    said: list[str] = []
    monkeypatch.setattr(embedding_cache.logger, "warning", lambda text, *values: said.append(text % values))
    assert cache.read(cat) is None
    (warning,) = said
    assert "the prompt 'a cat' is encoded again" in warning
    assert cache.lacking([cat]) == [cat]


def test_a_folder_that_takes_no_files_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = (
        rf"^embeddings of prompts cannot be written to {tmp_path}/file: it is a file; fix that and continue with --res"
    )
    with pytest.raises(RunError, match=said):
        written(tmp_path / "file", "a cat")


def test_what_fits_beside_the_wanted_free_space_is_affordable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = prompts_of("a", "b", "c", "d")
    cache = written(tmp_path, "a cat")
    (file,) = tmp_path.iterdir()
    size = file.stat().st_size
    assert size > 2 * SIZE
    for room, expected in ((0, 0), (size - 1, 0), (2 * size, 2), (100 * size, 4), (-5, 0)):
        monkeypatch.setattr("solrl_ray.prompts.embedding_cache.free_bytes", lambda folder, room=room: 3e9 + room)
        assert cache.affordable(wanted, 3.0) == wanted[:expected]
        resumed = EmbeddingCache(tmp_path, IDENTITY)
        assert resumed.read(prompts_of("a cat")[0]) is not None
        assert resumed.affordable(wanted, 3.0) == wanted[:expected]


def test_the_digest_covers_names_dtypes_shapes_and_bytes() -> None:
    base = embedding_digest({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])})
    assert base == embedding_digest({"b": torch.tensor([3.0]), "a": torch.tensor([1.0, 2.0])})
    changed = [
        {"a": torch.tensor([1.0, 2.5]), "b": torch.tensor([3.0])},
        {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])},
        {"a": torch.tensor([1.0, 2.0]), "c": torch.tensor([3.0])},
        {"a": torch.tensor([1.0, 2.0]).view(torch.int32), "b": torch.tensor([3.0])},
    ]
    assert len({base, *(embedding_digest(tensors) for tensors in changed)}) == 5
