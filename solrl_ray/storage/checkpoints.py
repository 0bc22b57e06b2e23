"""Retention of checkpoints, search for the newest valid one, and copies to remote storage (`checkpoints.upload`).

    checkpoint ─► bounded queue ─► thread: data files, those of `BESIDE`, then state.json ─► prune copies

The local folder is authoritative and never waits for a copy. A copy is complete when it has its ``state.json``, which
holds the checksums of the other files. The copies form a run folder: download it, and ``--resume`` accepts it. When the
run has ended, the files in `END` are copied too.
"""

from __future__ import annotations

import posixpath
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

import fsspec

from solrl_ray.common.files import tell_once
from solrl_ray.config.schema import Checkpoints
from solrl_ray.errors import UserError

if TYPE_CHECKING:  # importing it takes seconds, and retention does not need it
    from solrl_ray.learning.state import LearnerState

MANIFEST = "state.json"
"""File of a checkpoint with the checksums of its other files; written last."""
BESIDE = ("format", "config.yaml", "prompts.json", "metrics.jsonl")
"""Files of the run folder that are needed to resume from a copy."""
TRACKED = "trackers.json"
"""File with the run's id at trackers, if it uses any."""
END = (
    *BESIDE,
    TRACKED,
    "starts.json",
    "events.jsonl",
    "attestations.json",
    "evaluations",
    "lora",
    "lora_best",
    "summary.json",
    "report.html",
)
"""Files and whole folders of the run folder that are copied at the end of the run."""
WAITING = 4
"""Maximum number of checkpoints waiting to be copied. Another one replaces the oldest."""


def retained(updates: Iterable[int], checkpoints: Checkpoints, best: Collection[int] = ()) -> set[int]:
    """The checkpoints to keep, out of those after `updates` updates.

    These are the newest `checkpoints.keep`, every `checkpoints.every`-th permanently, and those in `best`.
    """
    available = sorted(updates)
    permanent = {n for n in available if checkpoints.every and n % checkpoints.every == 0}
    return set(available[-checkpoints.keep :]) | permanent | {n for n in available if n in best}


def newest_state(
    checkpoints: Sequence[tuple[int, Path]], run: Path
) -> tuple[int, LearnerState | None, tuple[str, ...]]:
    """The newest checkpoint that verifies: its updates, its state, and a note on each newer one that is damaged.

    0 and None if there are no checkpoints.

    Args:
        checkpoints: (updates, folder), oldest first.
        run: the run folder, for the error message.

    Raises UserError if all checkpoints are damaged.
    """
    from solrl_ray.learning.state import LearnerState

    damaged: list[tuple[int, str]] = []
    for updates, path in reversed(checkpoints):
        try:
            state = LearnerState.load(path)
        except UserError as error:
            damaged.append((updates, str(error)))
            continue
        notes = (
            f"the checkpoint after {number} updates is skipped: {reason}; using the one after {updates}"
            for number, reason in damaged
        )
        return updates, state, tuple(notes)
    if damaged:
        raise UserError(f"no checkpoint of {run} can be read: {damaged[0][1]}")
    return 0, None, ()


def newest_told(checkpoints: Sequence[tuple[int, Path]], run: Path) -> LearnerState | None:
    """The state of `newest_state`, for commands that only read the run; its notes are printed."""
    _, state, notes = newest_state(checkpoints, run)
    for note in notes:
        tell_once(note)
    return state


def state_before(checkpoints: Sequence[tuple[int, Path]], updates: int) -> LearnerState | None:
    """The state one update before the checkpoint after `updates`; None if that is the start of the run.

    Raises UserError if the checkpoint is missing or damaged.
    """
    from solrl_ray.learning.state import LearnerState

    stored = dict(checkpoints)
    if updates - 1 in stored:
        return LearnerState.load(stored[updates - 1])
    if updates == 1:
        return None
    raise UserError(
        f"the checkpoint after {updates - 1} updates is missing, but iteration {updates} is explored with its policy "
        f"(rollout.max_staleness is 1); set checkpoints.keep to at least 2"
    )


def filesystem(url: str, key: str = "checkpoints.upload") -> tuple[Any, str]:
    """The fsspec filesystem of a URL or local path, and the path in it.

    Raises `UserError` naming `key` if the filesystem is unknown or its package is not installed.
    """
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{key} is {url!r}, which needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise UserError(f"{key} is {url!r}; it must be a path, or a URL that fsspec supports: {error}") from error
    return files, str(path)


class Uploader:
    """Copies finished checkpoints of a run in a background thread. A failed copy is reported, but raises no error."""

    def __init__(self, run: Path, checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
        """
        Args:
            run: the run folder. Copies go to a folder of the same name below `checkpoints.upload`.
            checkpoints: the retention policy, also applied to the copies.
            say: called from the thread with a sentence about each failure.
        """
        self._run = run
        self._checkpoints = checkpoints
        self._say = say
        self._url = checkpoints.upload
        self._files, root = filesystem(self._url)
        self._root = posixpath.join(root, run.name)
        self._best: Collection[int] = ()
        self._waiting: Queue[Path | None] = Queue()
        """Checkpoint folders to copy; None marks the end of the run."""
        self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Path, best: Collection[int] = ()) -> None:
        """Queue a finished checkpoint folder for copying, without waiting; `best` as in `retained`."""
        self._best = best
        if self._waiting.qsize() == WAITING:
            with suppress(Empty):  # the thread has just taken it
                oldest = self._waiting.get_nowait()
                assert oldest is not None  # nothing is submitted after the end
                self._say(f"{oldest.name} is not copied to {self._url}, because copying is slower than training")
        self._waiting.put(checkpoint)

    def close(self, *, seconds: float) -> None:
        """Copy the waiting checkpoints and the results of the run, for at most `seconds`, and end the thread."""
        self._waiting.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(
                f"not all results of the run were copied to {self._url} within {seconds:g} s; they are in {self._run}"
            )

    def _work(self) -> None:
        while True:
            checkpoint = self._waiting.get()
            name = checkpoint.name if checkpoint else "the results of the run"
            try:
                if checkpoint:
                    self._copy(checkpoint)
                else:
                    self._copy_end()
            except Exception as error:  # each filesystem raises different errors, and training must continue
                reason = " ".join(str(error).split()) or type(error).__name__
                self._say(f"{name} was not copied to {self._url}: {reason}")
            if checkpoint is None:
                return

    def _copy_end(self) -> None:
        for name in END:
            path = self._run / name
            for file in sorted(path.rglob("*") if path.is_dir() else [path]):
                if file.is_file():
                    copy = posixpath.join(self._root, file.relative_to(self._run).as_posix())
                    self._files.makedirs(posixpath.dirname(copy), exist_ok=True)
                    self._files.put_file(str(file), copy)

    def _copy(self, checkpoint: Path) -> None:
        number = number_of(checkpoint.name)
        copies = self._copies()
        # A run that was resumed from an earlier checkpoint writes the later ones again.
        for later in (n for n in copies if n >= number):
            self._remove(copies[later])
        folder = posixpath.join(self._root, "checkpoints", checkpoint.name)
        self._files.makedirs(folder, exist_ok=True)
        for file in sorted(checkpoint.iterdir()):
            if file.name != MANIFEST:
                self._files.put_file(str(file), posixpath.join(folder, file.name))
        # A checkpoint of 0 updates may exist before the first metrics.
        for name in (name for name in (*BESIDE, TRACKED) if (self._run / name).is_file()):
            self._files.put_file(str(self._run / name), posixpath.join(self._root, name))
        self._files.put_file(str(checkpoint / MANIFEST), posixpath.join(folder, MANIFEST))
        copies = self._copies()
        for old in copies.keys() - retained(copies, self._checkpoints, self._best):
            self._remove(copies[old])

    def _copies(self) -> dict[int, str]:
        """Updates → path of the copied checkpoints."""
        folder = posixpath.join(self._root, "checkpoints")
        self._files.invalidate_cache(folder)
        if not self._files.isdir(folder):
            return {}
        paths = self._files.ls(folder, detail=False)
        named = ((number_of(posixpath.basename(path.rstrip("/"))), path) for path in paths)
        return {number: path for number, path in named if number >= 0}

    def _remove(self, folder: str) -> None:
        """Remove a copy, its manifest first, so that a half-removed folder does not look like a checkpoint."""
        manifest = posixpath.join(folder, MANIFEST)
        if self._files.exists(manifest):
            self._files.rm_file(manifest)
        self._files.rm(folder, recursive=True)


def number_of(name: str) -> int:
    """The number in a name: 20 for ``iteration-000020``; -1 for a name of another form."""
    match = re.fullmatch(r"iteration-([0-9]{6,})", name)
    return int(match[1]) if match else -1
