"""Reading somebody else's run folder neither connects to an address that it names nor executes what lies in it."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from solrl_ray.common import ray_auth
from solrl_ray.common.files import claim
from solrl_ray.config import own_functions
from solrl_ray.config.loading import to_yaml
from solrl_ray.storage.journal import Journal
from tests.support import made_runs
from tests.support.command_line import solrl
from tests.support.patience import patience

CODE = "from pathlib import Path\nPath({!r}).touch()\ndef score(images, prompts):\n    return [0.0] * len(prompts)\n"


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[object]]]:
    """An address, and who has connected to it."""
    monkeypatch.setattr(ray_auth, "clusters_here", list)
    came: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    came.append(server.accept())
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", came
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def hostile(tmp_path: Path, visits: tuple[str, list[object]]) -> Iterator[tuple[Path, Path]]:
    """A finished run's folder of somebody who holds it open, and the mark of executed code."""
    folder, marker = made_runs.write_run(tmp_path / "run"), tmp_path / "executed"
    (tmp_path / "mine.py").write_text(CODE.format(str(marker)))
    own = f"{tmp_path / 'mine.py'}:score"
    values = made_runs.config().model_dump(mode="json") | {"rewards": [{"kind": own}]}
    values["evaluation"] |= {"reference": own}
    config = type(made_runs.config()).model_validate(values)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / own_functions.FOLDER).mkdir()
    (folder / own_functions.FOLDER / "mine.py").write_text(CODE.format(str(marker)))
    (folder / "cluster").write_text(f"{visits[0]}\n")
    bomb = pickle.dumps(Bomb(marker))
    for name in (
        "lora/pytorch_lora_weights.safetensors",
        "checkpoints/iteration-000003/state.json",
        "checkpoints/iteration-000003/learner.safetensors",
        "samples/iteration-000003/aa.safetensors",
        "journal/iteration-000003.jsonl",
        "embeddings/a.safetensors",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bomb)
    with (folder / "lock").open("wb") as file:
        claim(folder, file, alone=True)
        yield folder, marker


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def huge(file: Path) -> None:
    """A sparse file, larger than this machine's memory."""
    file.touch()
    os.truncate(file, 2**42)


def bomb(file: Path) -> None:
    names = [f"*a{number}" for number in range(9)]
    lines = (f"b{n}: &a{n + 1} [{', '.join([name] * 9)}]" for n, name in enumerate(names))
    file.write_text("\n".join(["first: &a0 {x: 1, y: 2}", *lines]))


READING = {
    "status": ["status", "{}"],
    "pool": ["pool", "scale", "{}", "--explorers", "2"],
    "report": ["report", "{}"],
    "report of two": ["report", "{}", "{}"],
    "trace": ["trace", "{}"],
    "push": ["push", "{}", "me/mine", "--dry-run"],
    "export": ["export", "{}", "--format", "kohya"],
    "plan": ["plan", "{}/config.yaml"],
    "config": ["config", "{}/config.yaml"],
}
EXECUTING = {"eval": ["eval", "{}"], "train": ["train", "--resume", "{}", "--dry-run"]}
"""Those that may execute its ``code/`` (SECURITY.md)."""


@pytest.mark.parametrize("name", [*READING, *EXECUTING])
def test_a_command_does_to_a_strangers_folder_what_security_md_says(
    name: str,
    hostile: tuple[Path, Path],
    visits: tuple[str, list[object]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("solrl_ray.storage.run_folder.RESUME_PATIENCE", 0.1)
    folder, marker = hostile
    assert solrl(*(part.format(folder) for part in (READING | EXECUTING)[name])) in (0, 1, 2)
    assert visits[1] == []
    assert not marker.exists() or (name in EXECUTING and marker.is_file())  # a folder is what the pickle makes


SPECIAL = {
    "config.yaml": [pipe, endless, huge, bomb],
    "format": [pipe, endless, huge],
    "metrics.jsonl": [pipe, endless, huge],
    "summary.json": [pipe, endless, huge],
    "starts.json": [pipe, endless, huge],
    "attestations.json": [pipe, endless, huge],
    "spans.jsonl": [pipe, endless, huge],
    "lora/pytorch_lora_weights.safetensors": [pipe, endless, huge],
    "checkpoints/iteration-000003/state.json": [pipe, endless, huge],
    "evaluations/updates-000000-base/aa-0.png": [pipe, endless, huge],
}


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, kinds in SPECIAL.items() for make in kinds])
def test_no_special_or_huge_file_of_a_strangers_folder_is_read(
    name: str, make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a command would wait, or fill the memory, without end."""
    monkeypatch.setattr(ray_auth, "clusters_here", list)
    folder = made_runs.write_run(tmp_path / "run")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    make(folder / name)
    began = time.monotonic()
    for command in READING.values():
        assert solrl(*(part.format(folder) for part in command)) in (0, 1, 2)
    assert time.monotonic() - began < patience(30.0)


def test_no_special_or_huge_file_of_a_journal_is_read(tmp_path: Path) -> None:
    for make in (pipe, endless, huge):
        make(tmp_path / "iteration-000001.jsonl")
        with pytest.raises(OSError, match="iteration-000001"):
            Journal(tmp_path / "iteration-000001.jsonl").recover()
        (tmp_path / "iteration-000001.jsonl").unlink()
