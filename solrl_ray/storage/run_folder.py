"""The folder of a run: paths and formats of its files, how it is begun, pruned, and cut back for a resumed run."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from solrl_ray.common.checked_json import as_record, parse, read_record, with_checksum
from solrl_ray.common.files import (
    lacks_space,
    located,
    make_folder,
    read_regular,
    remove,
    remove_partial,
    replace_file,
    sync,
    sync_folder,
)
from solrl_ray.config import compiled_learner, own_functions
from solrl_ray.config.loading import load, to_yaml
from solrl_ray.config.schema import Checkpoints, Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.metrics.records import EvaluationMetrics, Event, IterationMetrics
from solrl_ray.records import SampleGroup, SampleShape, Scores, Trajectory
from solrl_ray.storage.checkpoints import number_of, retained
from solrl_ray.storage.continuation import FORMAT, FORMAT_FILE, check_format
from solrl_ray.storage.folder_lock import FolderLock, unwritable
from solrl_ray.storage.journal import Journal

if TYPE_CHECKING:  # takes seconds; paths do not need it
    from solrl_ray.learning.state import LearnerState

RESUME_PATIENCE = 20.0
"""Seconds that a resumed run waits for its folder: a killed driver's cluster needs a moment to end."""
STARTS = "starts.json"
SUMMARY_FILE = "summary.json"
PLAN_FILE = "plan.txt"
RAY_LOG = "ray.log"
"""Ray's messages to the command."""
_BEFORE_TRAINING = (
    "metrics.jsonl",
    "events.jsonl",
    "evaluations",
    "samples",
    "tensorboard",
    "trace.json",
    "attestations.json",
    "prompts.json",
    "trackers.json",
    "wandb",
    RAY_LOG,
    STARTS,
)
"""Files that a run writes before its first preview is journaled."""
JOURNALS = 16
"""Iterations before the checkpoints that a run may go back to, whose journals stay for who wants to read them."""
_NUMBERED = re.compile(r"(?:iteration|updates)-([0-9]{6,})(?:[-.].*)?")
Measured = IterationMetrics | EvaluationMetrics
"""A line of ``metrics.jsonl``."""
_KINDS: dict[str, type[Measured]] = {"iteration": IterationMetrics, "evaluation": EvaluationMetrics}
"""By its ``event``."""


@dataclass(frozen=True, slots=True)
class Start:
    """A command that began or resumed a run."""

    when: str
    """UTC, ISO 8601."""
    host: str
    command: str


class Unreadable(Exception):
    """A stored group is missing, incomplete or altered."""


class RunFolder:
    """Paths and formats of one run folder. Its only state is the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        """Events of all processes that worked on the run; only ever appended to."""
        self.prompts = path / "prompts.json"
        """The prompts with which the run began: see `resume.check_prompts`."""
        self.embeddings = path / "embeddings"
        self.evaluations = path / "evaluations"
        self.references = self.evaluations / "references"
        """Reference pictures of the prompts whose pictures evaluations keep."""
        self.lora = path / "lora"
        self.lora_best = path / "lora_best"
        self.lock = FolderLock(path)

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        return cls(located(config.run.root, "run.root") / config.run.name)

    # Claiming it

    def create(self, config: Config, *, resume: bool, first: LearnerState | None = None) -> None:
        """Make the folder of a new run, or check that there is one to resume. Locks it and writes `config.yaml` and the
        number of its format.

        A run has begun once something was journaled or trained. What an earlier attempt left is removed, so that the
        corrected command can be repeated.

        `first`: the state that a warm-started run begins with. Raises UserError: a new run into a folder with a run, a
        resume of a folder without one or with more updates than `run.iterations`, another format, a folder in use, one
        that cannot be written, or less free disk space than `checkpoints.min_free_gb`.
        """
        if resume and not (self.path / "config.yaml").exists():
            raise UserError(f"there is nothing to resume: {self.path} holds no config.yaml")
        if resume:
            check_format(self.path)
        try:
            if reason := lacks_space(self.path, config.checkpoints.min_free_gb):
                raise UserError(f"the run folder is {self.path}, but {reason}")
            make_folder(self.path)
            self.lock.acquire(seconds=RESUME_PATIENCE if resume else 0.0)
            if resume:
                self.check_length(config.run.iterations, max((n for n, _ in self.checkpoints()), default=0))
            else:
                self._start_over(config)
            remove_partial(self.path)
            self.sync_folders()
            replace_file(self.path / FORMAT_FILE, f"{FORMAT}\n".encode())
            own_functions.store(config, self.path)
            replace_file(self.path / "config.yaml", to_yaml(config).encode())
            if first is not None:
                first.save(self.checkpoint(0))
        except OSError as error:
            self.lock.release()
            raise unwritable(self.path, error) from None
        except UserError:
            self.lock.release()
            raise

    def settle(self, config: Config) -> None:
        """Write into `config.yaml` what the run's cards have decided and a resumed run keeps.

        Raises UserError if it cannot be written.
        """
        try:
            written = compiled_learner.inherit_from(load([self.path / "config.yaml"]), config)
            replace_file(self.path / "config.yaml", to_yaml(written).encode())
        except OSError as error:
            raise unwritable(self.path, error) from None

    def sync_folders(self) -> None:
        """Sync all folders and names to the disk: a killed process may not have waited for it."""
        make_folder(self.path)
        for folder in (self.path, *(each for each in self.path.iterdir() if each.is_dir())):
            sync_folder(folder)

    def check_length(self, iterations: int, updates: int) -> None:
        """Raises UserError if more has been trained than `iterations`."""
        if iterations < updates:
            raise UserError(
                f"run.iterations is {iterations}, but {self.path} has made {updates} updates already; "
                f"it must be at least {updates}"
            )

    def resume_command(self, address: str | None = None) -> str:
        """The command that continues the run, on the cluster at `address`."""
        return shlex.join(["solrl", "train", "--resume", str(self.path), *(["--address", address] if address else [])])

    def note_start(self, command: Sequence[str]) -> None:
        """Record when, where and with which command the run begins or continues."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        program, *rest = command or ("",)
        name = Path(program).name
        module = ["python", "-m", Path(program).parent.name]  # of `python -m solrl_ray`
        words = [*(module if name == "__main__.py" else [name] if name else []), *rest]
        start = Start(when=when, host=os.uname().nodename, command=shlex.join(words))
        starts = [asdict(each) for each in (*self.starts(), start)]
        replace_file(self.path / STARTS, json.dumps(starts, indent=1).encode())

    def starts(self) -> tuple[Start, ...]:
        """Oldest first. Raises UserError if the file is damaged."""
        path = self.path / STARTS
        return read_record(path, tuple[Start, ...], "remove it") if path.is_file() else ()

    @property
    def begun(self) -> bool:
        """Whether something was journaled or trained, so that it can be resumed."""
        return any(updates for updates, _ in self.checkpoints()) or any((self.path / "journal").glob("*.jsonl"))

    def check_new(self, config: Config) -> None:
        """Raises UserError if there is a run already."""
        if self.begun:
            raise UserError(
                f"run.name is {config.run.name!r}, but {self.path} already holds a run; "
                "continue it with --resume or choose another name with --set run.name=…"
            )

    def _start_over(self, config: Config) -> None:
        self.check_new(config)
        if not (self.path / "config.yaml").exists():
            return  # other files are not ours
        for name in _BEFORE_TRAINING:
            remove(self.path / name)
        remove(self.checkpoint(0))

    # Paths

    def journal(self, iteration: int) -> Journal:
        return Journal(self.path / "journal" / f"iteration-{iteration:06d}.jsonl")

    def checkpoint(self, updates: int) -> Path:
        return self.path / "checkpoints" / f"iteration-{updates:06d}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(updates, folder) of all checkpoints, oldest first."""
        return _iterations(self.path / "checkpoints")

    def prune(self, checkpoints: Checkpoints, best: Collection[int] = ()) -> None:
        """Remove the checkpoints that `checkpoints` does not keep, the samples that the newest ones contain, and
        journals of more than `JOURNALS` iterations before. Those after `best` updates are kept.
        """
        there = dict(self.checkpoints())
        for updates in there.keys() - retained(there, checkpoints, best):
            remove(there[updates])
        oldest = min(sorted(there)[-checkpoints.keep :], default=0)
        for iteration, folder in _iterations(self.path / "samples"):
            if iteration < oldest:
                remove(folder)
        for path in list((self.path / "journal").glob("*")):
            number = _NUMBERED.fullmatch(path.name)
            if number and int(number[1]) < oldest - JOURNALS:
                remove(path)

    def drop_beyond(self, updates: int, *, staleness: int = 0) -> None:
        """Remove what follows from updates after `updates`: a resumed run makes it again, maybe with other bytes.

        The journal and the samples of iteration `updates` stay: the run continues inside that iteration. A checkpoint
        beyond is one that could not be read; it is renamed to ``….damaged``.

        `staleness`: iterations beyond whose journals stay as well: their exploring revisions exist.
        """
        if _ended_after(self.path / SUMMARY_FILE) > updates:  # or the run would seem to be over before it is evaluated
            remove(self.path / SUMMARY_FILE)
        for updates_there, folder in self.checkpoints():
            if updates_there > updates:
                remove(damaged := folder.with_name(f"{folder.name}.damaged"))
                folder.rename(damaged)
                sync_folder(folder.parent)
        for name in ("journal", "samples", "evaluations"):
            for path in sorted((self.path / name).glob("*")):
                number = _NUMBERED.fullmatch(path.name)
                if number and int(number[1]) > updates + (staleness if name == "journal" else 0):
                    remove(path)

    # Samples

    def save_group(self, group: SampleGroup) -> None:
        """Store a regenerated group, so that a resumed run need not make it again."""
        import safetensors.torch

        header = {
            "revision": group.revision,
            "indices": group.indices,
            "seconds": group.seconds,
            "worker": group.worker,
            **{name: column for name, column in group.columns.items() if column},
        }
        if group.shape:
            header["shape"] = astuple(group.shape)
        tensors = {"latents": group.latents}
        if group.trajectory is not None:
            header["first_step"] = group.trajectory.first_step
            tensors["states"] = group.trajectory.states
        content = safetensors.torch.save(tensors, metadata={"group": json.dumps(header)})
        replace_file(self._group_path(group.iteration, group.prompt_id), content)

    def load_group(self, iteration: int, prompt_id: str) -> SampleGroup:
        """Read a stored group; only its digest shows whether its bytes are the stored ones.

        Raises Unreadable if it is missing, or no group.
        """
        from solrl_ray.common import safetensors_file

        path = self._group_path(iteration, prompt_id)
        try:
            metadata, tensors = safetensors_file.read(read_regular(path, math.inf))
            header = json.loads(metadata["group"])
            trajectory = None
            if "first_step" in header:
                trajectory = Trajectory(states=tensors["states"], first_step=header["first_step"])
            return SampleGroup(
                iteration=iteration,
                revision=header["revision"],
                prompt_id=prompt_id,
                indices=tuple(header["indices"]),
                **{each.name: _column(header[each.name]) for each in fields(Scores) if each.name in header},
                latents=tensors["latents"],
                shape=SampleShape(*header["shape"]) if "shape" in header else None,
                trajectory=trajectory,
                seconds=header["seconds"],
                worker=header["worker"],
            )
        # Errors that altered bytes can cause: no key, no list, another type.
        except (OSError, RunError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unreadable(f"{path} cannot be read: {error}") from error

    def _group_path(self, iteration: int, prompt_id: str) -> Path:
        return self.path / "samples" / f"iteration-{iteration:06d}" / f"{prompt_id}.safetensors"

    # Metrics

    def append_metrics(self, record: Measured) -> None:
        """Add one record and wait until it is on the disk."""
        _append(self.metrics, _line(record))

    def read_metrics(self) -> list[Measured]:
        """All records; an incomplete last line is left out.

        Raises UserError if another line has a wrong checksum, or is no record.
        """
        if not self.metrics.exists():
            return []
        lines = read_regular(self.metrics).split(b"\n")
        return [_record(line, f"{self.metrics}, line {number},") for number, line in enumerate(lines[:-1], start=1)]

    def read_metrics_until(self, updates: int) -> list[Measured]:
        """The records of the first `updates` updates: a resumed run measures the later ones again."""
        return [r for r in self.read_metrics() if r.iteration < updates + isinstance(r, EvaluationMetrics)]

    def rewind_metrics(self, updates: int) -> None:
        """Keep only the result of `read_metrics_until`."""
        if self.metrics.exists():
            replace_file(self.metrics, b"".join(map(_line, self.read_metrics_until(updates))))

    # Events

    def append_events(self, *events: Event) -> None:
        """Add events and wait until they are on the disk, after a line that a killed process left incomplete."""
        held = self.events.read_bytes() if self.events.exists() else b""
        lines = "".join(json.dumps(asdict(event)) + "\n" for event in events)
        _append(self.events, b"\n" * (held[-1:] not in (b"", b"\n")) + lines.encode())

    def note_end(self, what: str) -> None:
        """Record why a command ended before its run."""
        iteration = max((updates for updates, _ in self.checkpoints()), default=0)
        self.append_events(Event.now(iteration, "end", what))

    def read_events(self) -> tuple[Event, ...]:
        """All events, oldest first; incomplete and damaged lines are left out, since no result depends on them."""
        found = []
        for line in self.events.read_bytes().splitlines() if self.events.is_file() else ():
            with suppress(ValueError, RecursionError, UserError):
                found.append(as_record(Event, json.loads(line), str(self.events)))
        return tuple(found)


class EventLog:
    """The events of one process, stored once each though an abandoned thread may still be storing."""

    def __init__(self, folder: RunFolder) -> None:
        self.all: list[Event] = []
        self._folder, self._stored, self._turn = folder, 0, Lock()

    def store(self) -> None:
        """Write those that are not in ``events.jsonl`` yet."""
        with self._turn:
            if new := self.all[self._stored :]:
                self._folder.append_events(*new)
                self._stored += len(new)


def _append(path: Path, lines: bytes) -> None:
    """Add lines to a file, and wait until they are on the disk."""
    created = not path.exists()
    with path.open("ab") as file:
        file.write(lines)
        file.flush()
        sync(path, file)
    if created:
        sync_folder(path.parent)


def _iterations(folder: Path) -> list[tuple[int, Path]]:
    """(number, folder) of the folders named ``iteration-000020`` in `folder`, rising; others are not ours."""
    named = ((number_of(path.name), path) for path in folder.glob("iteration-*"))
    return sorted((number, path) for number, path in named if number >= 0 and path.is_dir())


def _ended_after(summary: Path) -> int:
    """Updates after which it was written; 0 if there is none, or if it is damaged, which is told when it is read."""
    try:
        return int(parse(read_regular(summary))["iterations"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _column(values: list[Any]) -> tuple[Any, ...]:
    """A column of `Scores`, as JSON has it."""
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _line(record: Measured) -> bytes:
    return (json.dumps(with_checksum(asdict(record))) + "\n").encode()


def _record(line: bytes, where: str) -> Measured:
    try:
        values = parse(line)
    except ValueError as error:
        raise UserError(f"{where} is damaged: {error}.") from error
    event = values.pop("event", None)
    if event not in _KINDS:
        raise UserError(f"{where} holds the event {event!r}; known are {' and '.join(map(repr, _KINDS))}.")
    return as_record(_KINDS[event], values, where)
