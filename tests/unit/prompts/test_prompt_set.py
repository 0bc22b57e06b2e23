"""Prompt files, the choice of an iteration's prompts, and the cache of embeddings."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from solrl_ray import models
from solrl_ray.errors import UserError
from solrl_ray.models.base import DiffusionModel
from solrl_ray.prompts.embedding_cache import EmbeddingCache, embedding_digest
from solrl_ray.prompts.prompt_set import choose, prompt_id, read_prompts
from solrl_ray.records import Prompt
from tests.support import tiny


def prompts_of(*texts: str) -> list[Prompt]:
    return [Prompt(id=prompt_id(text), text=text) for text in texts]


def test_a_prompt_id_is_blake2b_64_of_the_text() -> None:
    # From `printf 'a red square' | b2sum -l 64`.
    assert prompt_id("a red square") == "1282d5c5f820ea22"
    assert prompt_id("A red square") != prompt_id("a red square")


# --- files


def test_a_text_file_is_one_prompt_a_line_without_repeats(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeffa cat\r\n\n  a dog \na cat\nzwei\u2028Zeilen, größer\n".encode())
    read = read_prompts(str(file))
    assert [prompt.text for prompt in read] == ["a cat", "a dog", "zwei\u2028Zeilen, größer"]
    assert [prompt.id for prompt in read] == [prompt_id(prompt.text) for prompt in read]


def test_a_jsonl_file_has_its_prompts_under_text(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"text": "a cat", "tag": 1}\n\n{"text": " a dog"}\n{"text": "a cat"}\n')
    assert [prompt.text for prompt in read_prompts(str(file))] == ["a cat", "a dog"]


def test_builtin_prompts_are_inside_the_package() -> None:
    assert len(read_prompts("builtin:testbed/prompts/train.txt")) > 100


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "none.txt",
            None,
            r"^prompts\.train is '.*none\.txt', but .* cannot be read \(No such file or directory\); give",
        ),
        ("empty.txt", b"", r"^prompts\.train is .* holds no prompt"),
        ("blank.txt", b" \n\n\t\n", r"holds no prompt"),
        ("latin.txt", b"gr\xf6\xdfer", r"is not UTF-8 text"),
        ("bad.jsonl", b'{"text": "a"}\nnot json\n', r"^prompts\.train: .*bad\.jsonl, line 2 is not JSON"),
        ("key.jsonl", b'{"prompt": "a"}', r"line 1 has no prompt; it needs a key 'text'"),
        ("list.jsonl", b'["a"]', r"line 1 is not a JSON object"),
    ],
)
def test_a_bad_prompt_file_is_a_user_error(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(str(tmp_path / name), key="prompts.train")


def test_of_a_relative_path_the_folder_that_it_counts_from_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=rf"; the path counts from this command's folder, {re.escape(str(tmp_path))}; give"
    ):
        read_prompts("prompts/heldout.jsonl")


def test_a_folder_is_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        read_prompts(str(tmp_path))


# --- choice


def test_a_prompt_file_that_is_not_shipped_is_refused_with_those_that_are() -> None:
    ships = r"; this package ships builtin:testbed/prompts/heldout\.txt, builtin:testbed/prompts/train\.txt\.$"
    with pytest.raises(UserError, match=ships):
        read_prompts("builtin:train.txt")


def test_a_choice_is_distinct_and_depends_on_seed_and_iteration_alone() -> None:
    prompts = prompts_of(*(f"prompt {i}" for i in range(50)))
    first = choose(prompts, run_seed=42, iteration=3, count=12)
    assert len({prompt.id for prompt in first}) == 12
    assert first == choose(prompts, run_seed=42, iteration=3, count=12)
    assert first == choose(prompts, run_seed=42, iteration=3, count=20)[:12]
    assert first != choose(prompts, run_seed=42, iteration=4, count=12)
    assert first != choose(prompts, run_seed=43, iteration=3, count=12)


def test_every_prompt_is_chosen_about_equally_often() -> None:
    prompts = prompts_of(*(f"prompt {i}" for i in range(10)))
    counts = Counter(p.id for i in range(1000) for p in choose(prompts, run_seed=1, iteration=i, count=3))
    # 300 expected, binomial standard deviation 14.5: five of them.
    assert all(abs(counts[prompt.id] - 300) < 73 for prompt in prompts)


def test_choosing_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 3 prompts, but there are 2"):
        choose(prompts_of("a", "b"), run_seed=1, iteration=0, count=3)


# --- embeddings


@pytest.fixture(scope="module")
def model(tiny_pipeline: Path) -> DiffusionModel:
    return models.load(tiny.model_config(tiny_pipeline, dtype="bfloat16"), "cpu", components={"text"})


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_embeddings_come_in_order_and_are_written_once(model: DiffusionModel, tmp_path: Path) -> None:
    cat, dog = prompts_of("a cat", "a dog")
    first = EmbeddingCache(tmp_path, model).get([dog, cat, dog])
    assert [embedding.prompt_id for embedding in first] == [dog.id, cat.id, dog.id]
    assert len(files(tmp_path)) == 2
    assert all(name.endswith(".safetensors") for name in files(tmp_path))
    before = files(tmp_path)
    again = EmbeddingCache(tmp_path, model).get([cat, dog])
    assert files(tmp_path) == before
    assert [embedding.digest for embedding in again] == [first[1].digest, first[0].digest]
    expected = model.encode(["a cat"])[0]
    assert again[0].tensors.keys() == expected.keys() == {"prompt_embeds", "pooled_prompt_embeds"}
    for name, tensor in expected.items():
        assert again[0].tensors[name].dtype == torch.bfloat16
        assert torch.equal(again[0].tensors[name], tensor)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_encoded_again_with_a_warning(
    model: DiffusionModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    prompts = prompts_of("a cat")
    good = EmbeddingCache(tmp_path, model).get(prompts)[0]
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    damaged = {"cut": content[:-10], "flipped": content[:-1] + bytes([content[-1] ^ 1]), "empty": b""}[damage]
    file.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, logger="solrl_ray"):
        again = EmbeddingCache(tmp_path, model).get(prompts)[0]
    assert again.digest == good.digest
    assert file.read_bytes() == content
    assert "embedding of 'a cat' is encoded again" in caplog.text


def test_other_text_encoders_do_not_share_embeddings(model: DiffusionModel, tmp_path: Path) -> None:
    other_path = tiny.build_pipeline(tmp_path / "pipeline", seed=9)
    config = tiny.model_config(other_path, dtype="bfloat16")
    other = models.load(config, "cpu", components={"text"})
    first = EmbeddingCache(tmp_path / "cache", model).get(prompts_of("a cat"))[0]
    second = EmbeddingCache(tmp_path / "cache", other).get(prompts_of("a cat"))[0]
    assert first.digest != second.digest
    assert len(files(tmp_path / "cache")) == 2


def test_a_cache_needs_the_text_encoders(tiny_pipeline: Path, tmp_path: Path) -> None:
    without = models.load(tiny.model_config(tiny_pipeline), "cpu", components={"vae"})
    with pytest.raises(ValueError, match=r"'text' of .* was not loaded"):
        EmbeddingCache(tmp_path, without)


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
