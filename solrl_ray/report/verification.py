"""``solrl verify``: whether every file of a run folder is unchanged since it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from solrl_ray.common import own_code
from solrl_ray.config import continuation, own_functions
from solrl_ray.config.problems import counted
from solrl_ray.errors import RunError, UserError
from solrl_ray.learning.state import LearnerState
from solrl_ray.report.data import read_attestations, read_summary
from solrl_ray.report.summary import stamp
from solrl_ray.scheduling.iteration_state import group_digest
from solrl_ray.storage.journal import Journal
from solrl_ray.storage.run_folder import SUMMARY_FILE, RunFolder, Unreadable


@dataclass(frozen=True, slots=True)
class Verified:
    name: str
    problem: str
    """A sentence; empty if it is unchanged."""
    detail: str = ""


def verify(path: Path) -> Iterator[Verified]:
    """The files of a run, one after another. Raises UserError if it is no run folder."""
    config, folder = continuation.stored(path), RunFolder(path)
    known = f"readable, and the run folder has format {continuation.FORMAT}, which this version reads"
    yield Verified("config.yaml", "", known)
    for function in own_functions.of(config):
        if found := own_code.read(function.spec, path / own_functions.FOLDER):
            yield Verified(f"code of {function.spec}", "", f"{counted(len(found.files), 'file')}, readable")
    yield _tried("metrics.jsonl", lambda: f"{len(folder.read_metrics())} records")
    yield _tried("attestations.json", lambda: f"{len(read_attestations(path / 'attestations.json'))} workers")
    for file in sorted((path / "journal").glob("*.jsonl")):
        yield _journal(Journal(file))
    for updates, checkpoint in folder.checkpoints():
        yield _tried(f"checkpoints/{checkpoint.name}", partial(_state, checkpoint, updates))
    for file in sorted((path / "samples").glob("iteration-*/*.safetensors")):
        iteration = int(file.parent.name.removeprefix("iteration-"))
        yield _tried(str(file.relative_to(path)), partial(_samples, folder, iteration, file.stem))
    if (path / SUMMARY_FILE).is_file():
        yield from _summary(path, config.run.iterations)


def _tried(name: str, look: Callable[[], str]) -> Verified:
    try:
        return Verified(name, "", look())
    except (UserError, RunError, Unreadable, OSError) as error:
        return Verified(name, str(error))


def _journal(journal: Journal) -> Verified:
    name, damaged = f"journal/{journal.path.name}", journal.damaged()
    if damaged:
        return Verified(name, f"line {damaged[0]} is damaged, and the {damaged[1]} after it are left out")
    return Verified(name, "", f"{len(journal.entries())} entries")


def _samples(folder: RunFolder, iteration: int, prompt_id: str) -> str:
    group = folder.load_group(iteration, prompt_id)
    written = [e for e in folder.journal(iteration).entries() if e["kind"] == "regenerate" and e["prompt"] == prompt_id]
    if any(entry["digest"] != group_digest(group) for entry in written):
        raise UserError(f"the samples of prompt {prompt_id} in iteration {iteration} differ from the journal")
    return counted(len(group.indices), "sample")


def _state(checkpoint: Path, updates: int) -> str:
    state = LearnerState.load(checkpoint)
    if state.updates != updates:
        raise UserError(f"{checkpoint} holds a state after {counted(state.updates, 'update')}")
    return f"{len(state.default)} factors"


def _summary(path: Path, iterations: int) -> Iterator[Verified]:
    try:
        summary = read_summary(path)
    except UserError as error:
        yield Verified(SUMMARY_FILE, str(error))
        return
    yield Verified(SUMMARY_FILE, "", counted(summary.iterations, "iteration"))
    if summary.iterations != iterations:
        return  # the run was extended since
    for name, stated in summary.files.items():
        same = (path / name).is_file() and stamp(path / name, int(stated["bytes"])) == stated
        problem = "" if same else f"{path / name} has changed since {SUMMARY_FILE} was written"
        yield Verified(f"{name} as summarised", problem, "unchanged")
