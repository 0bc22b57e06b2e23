"""Bytes that are not as they were are a sentence, or what was written: never a traceback, never another value."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from solrl_ray.errors import UserError
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.report.data import read_run
from solrl_ray.report.summary import summarize, write_summary
from solrl_ray.report.trace import Span, TraceWriter
from solrl_ray.storage.journal import Journal
from solrl_ray.storage.resume import check_readable
from solrl_ray.storage.run_folder import RunFolder
from tests import fuzz
from tests.support import made_runs
from tests.support.command_line import refusal, solrl

TENSORS = {"a.lora_A": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.uint8)}


def test_every_format_stands_a_short_search() -> None:
    found = fuzz.search(600, seed=7)
    assert sum(found.values()) == 600
    assert len({name.split()[0] for name in found}) >= 10


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = made_runs.write_run(tmp_path / "run")
    config, evaluations = made_runs.config(), made_runs.evaluations()
    spans = TraceWriter(folder)
    spans.write(Span(kind="unit", name="u", stage="explore", iteration=0, started=1.0, seconds=1.0))
    spans.close()
    (folder / "lora").mkdir(exist_ok=True)
    (folder / "lora" / "pytorch_lora_weights.safetensors").write_bytes(safetensors.torch.save(TENSORS))
    write_summary(folder, summarize(config, [made_runs.iteration(n) for n in range(3)], evaluations, seconds=1.0))
    return folder


def spoil(path: Path, at: int = 12) -> None:
    content = bytearray(path.read_bytes())
    content[at] = 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "attestations.json"])
def test_a_byte_that_is_no_text_is_a_sentence_that_names_the_file(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run / name)
    with pytest.raises(UserError, match=name):
        read_run(run)
    assert solrl("report", run) == 2
    assert name in capsys.readouterr().err


def test_a_number_that_was_altered_is_no_number(run: Path) -> None:
    for name in ("metrics.jsonl", "summary.json"):
        content = (run / name).read_text()
        (run / name).write_text(content.replace("0.", "1.", 1))
        with pytest.raises(UserError, match=rf"{name}.* damaged: .*checksum"):
            read_run(run)
        (run / name).write_text(content)
    read_run(run)


def test_a_damaged_line_in_the_middle_of_a_journal_is_told_with_what_is_lost(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "iteration-000003.jsonl")
    journal.append(*({"entry": n} for n in range(6)))
    journal.close()
    assert journal.damaged() is None
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join(lines) + lines[0][:7])
    assert journal.damaged() is None  # cut off: nobody was told of it
    journal.path.write_bytes(b"".join([*lines[:2], lines[2].replace(b"2", b"7"), *lines[3:]]))
    assert journal.damaged() == (3, 3)
    assert len(journal.entries()) == 2


def test_a_run_is_not_resumed_with_measurements_that_were_altered(run: Path) -> None:
    spoil(run / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1, is damaged"):
        check_readable(RunFolder(run), made_runs.config())


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"four"])
def test_a_format_that_is_no_number_is_damaged_and_not_another_version(
    run: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "format").write_bytes(content)
    said = refusal(capsys, "train", "--resume", run, "--dry-run")
    assert said.startswith(f"{run / 'format'} is damaged: it contains '")


def test_half_of_a_surrogate_pair_is_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "a red square"}\n{"text": "a \\ud83d"}\n')
    with pytest.raises(UserError, match=r"p\.jsonl, line 2 "):
        read_prompts(str(tmp_path / "p.jsonl"), "prompts.train")
