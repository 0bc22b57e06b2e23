"""The folder of a run: paths and formats of its files, creation, pruning, and rewinding for a resumed run."""

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

if TYPE_CHECKING:  # importing it takes seconds, and paths do not need it
    from solrl_ray.learning.state import LearnerState

RESUME_PATIENCE = 20.0
"""Seconds that a resumed run waits for the lock of its folder: the cluster of a killed driver takes a moment to end."""
STARTS = "starts.json"
SUMMARY_FILE = "summary.json"
PLAN_FILE = "plan.txt"
RAY_LOG = "ray.log"
"""File with Ray's messages to the command."""
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
"""Files and folders that a run writes before its first preview is journaled."""
JOURNALS = 16
"""Number of iterations before the oldest recent checkpoint whose journals are kept for inspection."""
_NUMBERED = re.compile(r"(?:iteration|updates)-([0-9]{6,})(?:[-.].*)?")
Measured = IterationMetrics | EvaluationMetrics
"""Record in a line of ``metrics.jsonl``."""
_KINDS: dict[str, type[Measured]] = {"iteration": IterationMetrics, "evaluation": EvaluationMetrics}
"""Value of ``event`` in a line of ``metrics.jsonl`` → type of the record."""


@dataclass(frozen=True, slots=True)
class Start:
    """A command that started or resumed a run."""

    when: str
    """Time, UTC, ISO 8601."""
    host: str
    """Name of the machine."""
    command: str
    """Command line, quoted for a shell."""


class Unreadable(Exception):
    """A stored group is missing, incomplete or damaged."""


class RunFolder:
    """Paths and formats of the files in one run folder. The only state is the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        """Events of all processes that worked on the run. Append-only."""
        self.prompts = path / "prompts.json"
        """Digest and number of the prompts that the run began with; see `resume.check_prompts`."""
        self.embeddings = path / "embeddings"
        self.evaluations = path / "evaluations"
        self.references = self.evaluations / "references"
        """Reference images of the prompts whose samples the evaluations keep."""
        self.lora = path / "lora"
        self.lora_best = path / "lora_best"
        self.lock = FolderLock(path)

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """The folder ``<run.root>/<run.name>``."""
        return cls(located(config.run.root, "run.root") / config.run.name)

    # Creation and locking

    def create(self, config: Config, *, resume: bool, first: LearnerState | None = None) -> None:
        """Create the folder of a new run, or check the folder of a run to resume. Locks it, and writes `config.yaml`
        and the format number.

        A run has begun once something was journaled or trained. Files from an attempt that never got this far are
        removed, so that a corrected command can be run again.

        Args:
            resume: whether to resume the run in the folder.
            first: the initial state of a warm-started run.

        Raises UserError for a new run if the folder already has a run; for a resumed run if the folder has none, has
        another format, or has more updates than `run.iterations`. In both cases also if the folder is in use or cannot
        be written, or if the disk has less free space than `checkpoints.min_free_gb`.
        """
        if resume and not (self.path / "config.yaml").exists():
            raise UserError(f"there is nothing to resume: {self.path} has no config.yaml")
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
        """Write the values to `config.yaml` that depend on the run's GPUs and that a resumed run must keep.

        Raises UserError if it cannot be written.
        """
        try:
            written = compiled_learner.inherit_from(load([self.path / "config.yaml"]), config)
            replace_file(self.path / "config.yaml", to_yaml(written).encode())
        except OSError as error:
            raise unwritable(self.path, error) from None

    def sync_folders(self) -> None:
        """Sync the run folder and its subfolders to the disk, because a killed process may not have done so."""
        make_folder(self.path)
        for folder in (self.path, *(path for path in self.path.iterdir() if path.is_dir())):
            sync_folder(folder)

    def check_length(self, iterations: int, updates: int) -> None:
        """Raise UserError if the run has made more `updates` than its `iterations`."""
        if iterations < updates:
            raise UserError(
                f"run.iterations is {iterations}, but {self.path} has made {updates} updates already; "
                f"set it to at least {updates}"
            )

    def resume_command(self, address: str | None = None) -> str:
        """The shell command that continues the run, on the Ray cluster at `address` if given."""
        return shlex.join(["solrl", "train", "--resume", str(self.path), *(["--address", address] if address else [])])

    def note_start(self, command: Sequence[str]) -> None:
        """Record time, machine and command of a start or resume."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        program, *arguments = command or ("",)
        name = Path(program).name
        module = ["python", "-m", Path(program).parent.name]  # of `python -m solrl_ray`
        words = [*(module if name == "__main__.py" else [name] if name else []), *arguments]
        start = Start(when=when, host=os.uname().nodename, command=shlex.join(words))
        starts = [asdict(recorded) for recorded in (*self.starts(), start)]
        replace_file(self.path / STARTS, json.dumps(starts, indent=1).encode())

    def starts(self) -> tuple[Start, ...]:
        """All starts and resumes, oldest first. Raises UserError if the file is damaged."""
        path = self.path / STARTS
        return read_record(path, tuple[Start, ...], "remove it") if path.is_file() else ()

    @property
    def begun(self) -> bool:
        """True if something was journaled or trained, so that the run can be resumed."""
        return any(updates for updates, _ in self.checkpoints()) or any((self.path / "journal").glob("*.jsonl"))

    def check_new(self, config: Config) -> None:
        """Raise UserError if the folder already has a run that has begun."""
        if self.begun:
            raise UserError(
                f"run.name is {config.run.name!r}, but {self.path} already holds a run; "
                "continue it with --resume or choose another name with --set run.name=…"
            )

    def _start_over(self, config: Config) -> None:
        self.check_new(config)
        if not (self.path / "config.yaml").exists():
            return  # files in it are not from an earlier attempt
        for name in _BEFORE_TRAINING:
            remove(self.path / name)
        remove(self.checkpoint(0))

    # Paths

    def journal(self, iteration: int) -> Journal:
        """The journal of an iteration."""
        return Journal(self.path / "journal" / f"iteration-{iteration:06d}.jsonl")

    def checkpoint(self, updates: int) -> Path:
        """Folder of the checkpoint after `updates` updates."""
        return self.path / "checkpoints" / f"iteration-{updates:06d}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(updates, folder) of all checkpoints, oldest first."""
        return _iterations(self.path / "checkpoints")

    def prune(self, checkpoints: Checkpoints, best: Collection[int] = ()) -> None:
        """Remove files that are no longer needed.

        These are checkpoints outside the retention policy `checkpoints` (those after `best` updates are kept), samples
        of iterations before the newest checkpoints, and journals that are `JOURNALS` iterations older than these.
        """
        stored = dict(self.checkpoints())
        for updates in stored.keys() - retained(stored, checkpoints, best):
            remove(stored[updates])
        oldest = min(sorted(stored)[-checkpoints.keep :], default=0)
        for iteration, folder in _iterations(self.path / "samples"):
            if iteration < oldest:
                remove(folder)
        for path in list((self.path / "journal").glob("*")):
            number = _NUMBERED.fullmatch(path.name)
            if number and int(number[1]) < oldest - JOURNALS:
                remove(path)

    def drop_beyond(self, updates: int, *, staleness: int = 0) -> None:
        """Remove files from after update `updates`. A resumed run writes them again, possibly with other bytes.

        The journal and the samples of iteration `updates` stay, because the run continues inside that iteration. Later
        checkpoints are those that could not be read; they are renamed to ``….damaged``.

        `staleness`: number of later iterations whose journals stay too, because their exploring revisions exist.
        """
        if _ended_after(self.path / SUMMARY_FILE) > updates:  # else the run would seem finished
            remove(self.path / SUMMARY_FILE)
        for later, folder in self.checkpoints():
            if later > updates:
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
        """Store a regenerated group, so that a resumed run need not regenerate it."""
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
        """Read a stored group. This does not verify its bytes; compare the digest to find altered ones.

        Raises Unreadable if the file is missing or has no valid group.
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
                **{column.name: _column(header[column.name]) for column in fields(Scores) if column.name in header},
                latents=tensors["latents"],
                shape=SampleShape(*header["shape"]) if "shape" in header else None,
                trajectory=trajectory,
                seconds=header["seconds"],
                worker=header["worker"],
            )
        # All errors that altered bytes can cause: a missing key, no list, another type.
        except (OSError, RunError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unreadable(f"{path} cannot be read: {error}") from error

    def _group_path(self, iteration: int, prompt_id: str) -> Path:
        return self.path / "samples" / f"iteration-{iteration:06d}" / f"{prompt_id}.safetensors"

    # Metrics

    def append_metrics(self, record: Measured) -> None:
        """Append one record and wait until it is on the disk."""
        _append(self.metrics, _line(record))

    def read_metrics(self) -> list[Measured]:
        """All records, oldest first. An incomplete last line is skipped.

        Raises UserError if another line has a wrong checksum or is not a valid record.
        """
        if not self.metrics.exists():
            return []
        lines = read_regular(self.metrics).split(b"\n")
        return [_record(line, f"{self.metrics}, line {number},") for number, line in enumerate(lines[:-1], start=1)]

    def read_metrics_until(self, updates: int) -> list[Measured]:
        """The records up to update `updates`. A resumed run measures the later ones again."""
        return [r for r in self.read_metrics() if r.iteration < updates + isinstance(r, EvaluationMetrics)]

    def rewind_metrics(self, updates: int) -> None:
        """Truncate the file to the records of `read_metrics_until`."""
        if self.metrics.exists():
            replace_file(self.metrics, b"".join(map(_line, self.read_metrics_until(updates))))

    # Events

    def append_events(self, *events: Event) -> None:
        """Append events and wait until they are on the disk. A line that a killed process left incomplete is ended
        first.
        """
        last = b""
        if self.events.is_file() and self.events.stat().st_size:
            with self.events.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
        lines = "".join(json.dumps(asdict(event)) + "\n" for event in events)
        _append(self.events, b"\n" * (last not in (b"", b"\n")) + lines.encode())

    def note_end(self, what: str) -> None:
        """Record an event with the reason why a command ended before its run was complete."""
        iteration = max((updates for updates, _ in self.checkpoints()), default=0)
        self.append_events(Event.now(iteration, "end", what))

    def read_events(self) -> tuple[Event, ...]:
        """All events, oldest first. Incomplete and damaged lines are skipped, since no result depends on events."""
        events = []
        for line in self.events.read_bytes().splitlines() if self.events.is_file() else ():
            with suppress(ValueError, RecursionError, UserError):
                events.append(as_record(Event, json.loads(line), str(self.events)))
        return tuple(events)


class EventLog:
    """The events of one process. Each is stored exactly once, even if an abandoned thread is still writing."""

    def __init__(self, folder: RunFolder) -> None:
        self.all: list[Event] = []
        self._folder, self._stored, self._turn = folder, 0, Lock()

    def store(self) -> None:
        """Append the events that are not in ``events.jsonl`` yet."""
        with self._turn:
            if new := self.all[self._stored :]:
                self._folder.append_events(*new)
                self._stored += len(new)


def _append(path: Path, lines: bytes) -> None:
    """Append lines to a file and wait until they are on the disk."""
    created = not path.exists()
    with path.open("ab") as file:
        file.write(lines)
        file.flush()
        sync(path, file)
    if created:
        sync_folder(path.parent)


def _iterations(folder: Path) -> list[tuple[int, Path]]:
    """(number, path) of the subfolders named like ``iteration-000020``, in ascending order; others are ignored."""
    named = ((number_of(path.name), path) for path in folder.glob("iteration-*"))
    return sorted((number, path) for number, path in named if number >= 0 and path.is_dir())


def _ended_after(summary: Path) -> int:
    """Number of updates in a summary; 0 if it is missing or damaged (the error is reported when it is read)."""
    try:
        return int(parse(read_regular(summary))["iterations"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _column(values: list[Any]) -> tuple[Any, ...]:
    """Convert a column of `Scores` from JSON: lists to tuples."""
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
        raise UserError(f"{where} has the event {event!r}; it must be {' or '.join(map(repr, _KINDS))}.")
    return as_record(_KINDS[event], values, where)
