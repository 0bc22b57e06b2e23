"""Prompt files, and the choice of an iteration's prompts."""

from __future__ import annotations

import hashlib
import re
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from solrl_ray.errors import UserError
from solrl_ray.prompts.prompt_set import choose, prompt_id, prompts_digest, read_prompts
from solrl_ray.records import Prompt, SampleShape

SHAPES = (SampleShape(512, 512), SampleShape(512, 768))


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


def test_a_prompt_may_name_the_shape_of_its_samples(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    lines = ['{"text": "a cat", "resolution": 512}', '{"text": "a dog", "resolution": [512, 768]}', '{"text": "a fox"}']
    file.write_text("\n".join([*lines, lines[1]]))
    cat, dog, fox = read_prompts(str(file), shapes=SHAPES)
    assert (cat.shape, dog.shape, fox.shape) == (*SHAPES, None)
    unnamed = prompts_of("a cat", "a dog", "a fox")
    assert prompts_digest(unnamed) == hashlib.sha256("".join(f"{p.id}\n" for p in unnamed).encode()).hexdigest()
    assert prompts_digest([cat, dog, fox]) != prompts_digest(unnamed)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"resolution": [768, 512]', r"line 2 has the 'resolution' \[768, 512\]; .* \[512, 512\], \[512, 768\]"),
        ('"resolution": "512x768"', r"line 2 has the 'resolution' '512x768'; .*\[height, width\]"),
        ('"resolution": 512', "line 2 repeats a prompt with another 'resolution'"),
    ],
)
def test_a_prompt_that_names_another_shape_than_the_runs_is_refused(tmp_path: Path, entry: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"text": "a cat"}\n{"text": "a cat", ' + entry + "}\n")
    with pytest.raises(UserError, match=rf"^prompts\.train: .*p\.jsonl, {message}"):
        read_prompts(str(file), "prompts.train", SHAPES)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "none.txt",
            None,
            r"^prompts\.train is '.*none\.txt', but .* cannot be read \(No such file or directory\); use",
        ),
        ("empty.txt", b"", r"^prompts\.train is .* has no prompts"),
        ("blank.txt", b" \n\n\t\n", r"has no prompts"),
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
        UserError, match=rf"; the path is relative to the current folder, {re.escape(str(tmp_path))}; use"
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


def test_reading_many_prompts_needs_about_the_memory_of_what_it_returns(tmp_path: Path) -> None:
    file = tmp_path / "many.txt"
    file.write_text("".join(f"{i} red squares {'on a blue ground ' * 20}\n" for i in range(20_000)))
    tracemalloc.start()
    try:
        prompts = read_prompts(str(file))
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(prompts) == 20_000
    assert most < kept + file.stat().st_size / 2  # the whole file and its lines would be twice its size
