"""Which checkpoints stay, and their copies on a second filesystem."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from solrl_ray.config.schema import Checkpoints
from solrl_ray.errors import UserError
from solrl_ray.report.data import read_run
from solrl_ray.storage import checkpoints
from solrl_ray.storage.checkpoints import Uploader, filesystem, retained
from solrl_ray.storage.continuation import FORMAT
from solrl_ray.storage.resume import resume_point
from solrl_ray.storage.run_folder import RunFolder
from tests.support import made_runs
from tests.support.made_checkpoints import small_state as state

DEADLINE = 20.0


@pytest.mark.parametrize(
    ("keep", "every", "stay"),
    [(1, 0, {7}), (2, 0, {6, 7}), (9, 0, {1, 2, 3, 5, 6, 7}), (1, 3, {3, 6, 7}), (2, 5, {5, 6, 7})],
)
def test_the_newest_and_every_nth_checkpoint_stay(keep: int, every: int, stay: set[int]) -> None:
    there = [7, 1, 2, 3, 5, 6]
    assert retained(there, Checkpoints(keep=keep, every=every)) == stay
    assert retained(there, Checkpoints(keep=keep, every=every), best={0, 2}) == stay | {2}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nosuch://bucket/x", r"^checkpoints\.upload is 'nosuch://bucket/x'; it must be a path, or a URL that fsspec"),
        ("s3://bucket/x", r"^checkpoints\.upload is 's3://bucket/x', which needs a package .*s3fs"),
    ],
)
def test_a_place_that_nothing_can_write_to_is_one_sentence(
    url: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    with pytest.raises(UserError, match=problem):
        filesystem(url)


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


def begun(root: Path, updates: int) -> RunFolder:
    """A run folder with `updates` measured iterations and no checkpoint yet."""
    run = RunFolder(root / "small")
    run.path.mkdir(parents=True)
    (run.path / "format").write_text(f"{FORMAT}\n")
    (run.path / "config.yaml").write_text("run: {name: small}\n")
    (run.path / "prompts.json").write_text("{}")
    for number in range(updates):
        run.append_metrics(made_runs.iteration(number))
    return run


def uploader(run: RunFolder, url: str, said: list[str], keep: int = 2) -> Uploader:
    return Uploader(run.path, Checkpoints(upload=url, keep=keep), said.append)


def copied(run: RunFolder, url: str, *updates: int, keep: int = 2) -> None:
    """Checkpoints after so many updates are made and copied, one after the other, and nothing goes wrong."""
    said: list[str] = []
    copies = uploader(run, url, said, keep)
    for each in updates:
        state(each).save(run.checkpoint(each))
        copies.submit(run.checkpoint(each))
    copies.close(seconds=DEADLINE)
    assert said == []


def test_a_copy_is_a_run_folder_that_a_run_goes_on_from(tmp_path: Path) -> None:
    run = begun(tmp_path, 4)
    (run.path / checkpoints.TRACKED).write_text("{}")
    copied(run, (tmp_path / "elsewhere").as_uri(), 1, 2, 3)
    point = resume_point(RunFolder(tmp_path / "elsewhere" / "small"), iterations=9)
    assert point.updates == 3
    assert point.state is not None
    assert point.state.updates == 3
    names = sorted(path.name for path in (tmp_path / "elsewhere/small/checkpoints").iterdir())
    assert names == ["iteration-000002", "iteration-000003"]
    assert (tmp_path / "elsewhere/small/config.yaml").read_text() == "run: {name: small}\n"
    assert (tmp_path / "elsewhere/small" / checkpoints.TRACKED).read_text() == "{}"


def test_a_checkpoint_before_the_first_measurement_is_copied(tmp_path: Path) -> None:
    run = begun(tmp_path, 0)
    assert not run.metrics.exists()
    copied(run, (tmp_path / "elsewhere").as_uri(), 0)
    assert resume_point(RunFolder(tmp_path / "elsewhere" / "small"), iterations=9).state is not None


def test_what_a_run_ends_with_is_copied_and_can_be_read_there(tmp_path: Path) -> None:
    run = RunFolder(made_runs.write_run(tmp_path / "small"))
    run.prompts.write_text("{}")
    run.lora.mkdir()
    (run.lora / "pytorch_lora_weights.safetensors").write_bytes(b"factors")
    (run.path / "trace.json").write_text("\n")
    (run.path / "report.html").write_text("<p>")
    copied(run, (tmp_path / "elsewhere").as_uri(), 3)
    here, there = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (run.path, tmp_path / "elsewhere" / "small")
    )
    assert here.keys() - there.keys() == {Path("trace.json")}
    assert there.items() <= here.items()
    assert read_run(tmp_path / "elsewhere" / "small").finished


def test_a_run_that_went_back_replaces_what_it_had_copied(tmp_path: Path, memory: MemoryFileSystem) -> None:
    copied(begun(tmp_path, 5), "memory://bucket/runs", 3, 4, 5, 4, keep=9)
    there = sorted(path.rsplit("/", 1)[-1] for path in memory.ls("/bucket/runs/small/checkpoints", detail=False))
    assert there == ["iteration-000003", "iteration-000004"]


def test_the_manifest_is_copied_last(tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    put, order = MemoryFileSystem.put_file, list[str]()

    def noted(self: MemoryFileSystem, source: str, target: str, **more: Any) -> Any:
        order.append(Path(target).name)
        return put(self, source, target, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", noted)
    copied(begun(tmp_path, 1), "memory://bucket", 1)
    assert sorted(order[:6]) == [
        "config.yaml",
        "format",
        "metrics.jsonl",
        "optimizer.safetensors",
        "policy.safetensors",
        "prompts.json",
    ]
    assert order[6:] == ["state.json", *checkpoints.BESIDE]  # which are copied once more at the end


def test_a_checkpoint_that_is_copied_again_looks_like_none_until_all_of_it_is_new(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, old = begun(tmp_path, 1), list[str]()
    put, folder = MemoryFileSystem.put_file, "/bucket/small/checkpoints/iteration-000001"

    def noted(self: MemoryFileSystem, source: str, target: str, **more: Any) -> Any:
        if f"{folder}/state.json" in self.store and Path(source).parent == run.checkpoint(1):
            old.append(Path(target).name)
        return put(self, source, target, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", noted)
    copied(run, "memory://bucket", 1, 1)
    assert f"{folder}/state.json" in memory.store
    assert old == []


def test_a_copy_that_fails_is_a_message_and_the_next_one_is_made(tmp_path: Path) -> None:
    run, said = begun(tmp_path, 2), list[str]()
    (tmp_path / "elsewhere").write_text("a file is in the way")
    copies = uploader(run, str(tmp_path / "elsewhere"), said)
    state(1).save(run.checkpoint(1))
    copies.submit(run.checkpoint(1))
    copies.close(seconds=DEADLINE)
    elsewhere = tmp_path / "elsewhere"
    for message, what in zip(said, ("iteration-000001", "the results of the run"), strict=True):
        assert message.startswith(f"{what} was not copied to {elsewhere}: ")
    (tmp_path / "elsewhere").unlink()
    said.clear()
    copies = uploader(run, str(tmp_path / "elsewhere"), said)
    copies.submit(run.checkpoint(2))  # never made: the failure of one
    state(1).save(run.checkpoint(1))
    copies.submit(run.checkpoint(1))
    copies.close(seconds=DEADLINE)
    assert [line.split()[0] for line in said] == ["iteration-000002"]
    assert (tmp_path / "elsewhere/small/checkpoints/iteration-000001/state.json").is_file()


def test_copies_that_are_too_slow_are_skipped_and_end_by_their_deadline(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said, going, go_on = begun(tmp_path, 1), list[str](), threading.Event(), threading.Event()

    def slow(self: Uploader, checkpoint: Path) -> None:
        going.set()
        assert go_on.wait(DEADLINE)

    monkeypatch.setattr(Uploader, "_copy", slow)
    copies = uploader(run, "memory://bucket", said)
    copies.submit(run.checkpoint(1))
    assert going.wait(DEADLINE)
    for updates in range(2, checkpoints.WAITING + 3):
        copies.submit(run.checkpoint(updates))
    assert said == ["iteration-000002 is not copied to memory://bucket, because copying is slower than training"]
    copies.close(seconds=0.01)
    assert said[1] == f"not all results of the run were copied to memory://bucket within 0.01 s; they are in {run.path}"
    go_on.set()
    shutil.rmtree(run.path)
