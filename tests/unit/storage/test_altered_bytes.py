"""Bytes that are not as they were are a sentence, or what was written: never a traceback, never another value."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from solrl_ray.errors import UserError
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.records import SampleGroup
from solrl_ray.report.data import read_run
from solrl_ray.report.summary import summarize, write_summary
from solrl_ray.report.trace import Span, SpanWriter, read_spans
from solrl_ray.scheduling.iteration_state import group_digest
from solrl_ray.storage.journal import Journal
from solrl_ray.storage.run_folder import RunFolder
from tests import fuzz
from tests.support import made_runs
from tests.support.command_line import solrl

TENSORS = {"a.lora_A": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.uint8)}


def test_every_format_stands_a_short_search() -> None:
    found = fuzz.search(600, seed=7)
    assert sum(found.values()) == 600
    assert len({name.split()[0] for name in found}) >= 11


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = made_runs.write_run(tmp_path / "run")
    config, evaluations = made_runs.config(), made_runs.evaluations()
    spans = SpanWriter(folder)
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


def test_a_span_of_other_bytes_is_left_out(run: Path) -> None:
    with (run / "spans.jsonl").open("ab") as file:
        file.write(b'{"kind": "\xff"}\n{"kind": "unit", "started": "x"}\n[]\n')
    assert [span.name for span in read_spans(run)] == ["u"]


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


def test_a_run_whose_files_are_as_written_is_verified_and_each_damage_found(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert solrl("verify", run) == 0
    assert "FAILS" not in capsys.readouterr().out
    spoiled_lines = {"metrics.jsonl": 2, "spans.jsonl": 1, "attestations.json": 2, "summary.json": 1}
    for name, spoiled in (*spoiled_lines.items(), ("lora/pytorch_lora_weights.safetensors", 1)):
        path = run / name
        content = path.read_bytes()
        spoil(path)
        assert solrl("verify", run) == 1
        said = capsys.readouterr().out
        assert said.count("FAILS") == spoiled, said
        path.write_bytes(content)


def test_what_a_worker_ran_cannot_be_altered_or_lost_unseen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its text has no checksum of its own, so another text may be one of its form."""
    path = run / "attestations.json"
    content = path.read_text()
    assert solrl("verify", run) == 0
    assert "ok     attestations.json as summarised: unchanged\n" in capsys.readouterr().out
    path.write_text(content.replace("nvfp4-emulated", "nvfp4", 1))
    assert path.read_text() != content
    assert solrl("verify", run) == 1
    assert "FAILS  attestations.json as summarised" in capsys.readouterr().out
    path.unlink()
    assert solrl("verify", run) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"four"])
def test_a_format_that_is_no_number_is_damaged_and_not_another_version(
    run: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "format").write_bytes(content)
    assert solrl("verify", run) == 2
    assert f"{run / 'format'} is damaged: it holds '" in capsys.readouterr().err


def test_samples_with_another_bit_are_not_those_of_the_journal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = SampleGroup(
        iteration=0, revision=0, prompt_id="aa", indices=(1, 3), rewards=(0.1, 0.2), latents=torch.ones(2, 4)
    )
    folder = RunFolder(run)
    folder.save_group(group)
    folder.journal(0).append({"kind": "regenerate", "prompt": "aa", "digest": group_digest(group)})
    assert solrl("verify", run) == 0
    assert "2 samples" in capsys.readouterr().out
    path = run / "samples" / "iteration-000000" / "aa.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert solrl("verify", run) == 1
    assert "the samples of prompt aa in iteration 0 differ from the journal" in capsys.readouterr().out


def test_half_of_a_surrogate_pair_is_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "a red square"}\n{"text": "a \\ud83d"}\n')
    with pytest.raises(UserError, match=r"p\.jsonl, line 2 "):
        read_prompts(str(tmp_path / "p.jsonl"), "prompts.train")
