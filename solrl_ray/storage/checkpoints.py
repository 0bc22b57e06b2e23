"""Which checkpoints are kept, which is the newest that verifies, and their copies elsewhere (`checkpoints.upload`).

    checkpoint ─► bounded queue ─► thread: data files, those of `BESIDE`, then state.json ─► prune there

The local folder is authoritative and never waits for a copy. A copy is complete when it has its ``state.json``, with
the checksums of the rest. The copies form a run folder: fetched back, ``--resume`` takes it. When the run has ended,
`END` is copied as well.
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

if TYPE_CHECKING:  # takes seconds; choosing which to keep does not need it
    from solrl_ray.learning.state import LearnerState

MANIFEST = "state.json"
BESIDE = ("format", "config.yaml", "prompts.json", "metrics.jsonl")
"""Files of the run folder that a checkpoint's copy needs to be resumed."""
TRACKED = "trackers.json"
"""The run's identity at trackers, if it has any."""
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
"""Files of the run folder that are useful after the run; folders with all their content."""
WAITING = 4
"""Checkpoints that may wait to be copied; a further one replaces the oldest."""


def retained(updates: Iterable[int], checkpoints: Checkpoints, best: Collection[int] = ()) -> set[int]:
    """The checkpoints after so many `updates` that are kept: the newest `keep`, every `every`-th for good, and those of
    the `best` evaluations.
    """
    there = sorted(updates)
    for_good = {n for n in there if checkpoints.every and n % checkpoints.every == 0}
    return set(there[-checkpoints.keep :]) | for_good | {n for n in there if n in best}


def newest_state(
    checkpoints: Sequence[tuple[int, Path]], run: Path
) -> tuple[int, LearnerState | None, tuple[str, ...]]:
    """The newest checkpoint that verifies, and a note on each damaged one before it; 0 and None if there is none.

    Args:
        checkpoints: (updates, folder), oldest first.
        run: the folder to name in an error.

    Raises UserError if all are damaged.
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
            f"the checkpoint after {number} updates is passed over: {reason}; going on from the one after {updates}"
            for number, reason in damaged
        )
        return updates, state, tuple(notes)
    if damaged:
        raise UserError(f"no checkpoint of {run} can be read: {damaged[0][1]}")
    return 0, None, ()


def newest_told(checkpoints: Sequence[tuple[int, Path]], run: Path) -> LearnerState | None:
    """`newest_state`, for who only reads the run: its notes are printed."""
    _, state, notes = newest_state(checkpoints, run)
    for note in notes:
        tell_once(note)
    return state


def state_before(checkpoints: Sequence[tuple[int, Path]], updates: int) -> LearnerState | None:
    """The state one update before the checkpoint after `updates`; None for the very start.

    Raises UserError if it is missing or damaged.
    """
    from solrl_ray.learning.state import LearnerState

    there = dict(checkpoints)
    if updates - 1 in there:
        return LearnerState.load(there[updates - 1])
    if updates == 1:
        return None
    raise UserError(
        f"the checkpoint after {updates - 1} updates is gone, but iteration {updates} is explored with its policy "
        f"(rollout.max_staleness 1); checkpoints.keep must be at least 2"
    )


def filesystem(url: str, key: str = "checkpoints.upload") -> tuple[Any, str]:
    """The fsspec filesystem of a URL or local path, and the path in it.

    Raises `UserError` naming `key` if the filesystem is unknown or its package is not installed.
    """
    try:
        found, place = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{key} is {url!r}, which needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise UserError(f"{key} is {url!r}; it must be a path or a URL that fsspec knows: {error}") from error
    return found, str(place)


class Uploader:
    """Copies one run's finished checkpoints in its own thread. A failed copy is a message, not an error."""

    def __init__(self, run: Path, checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
        """
        Args:
            run: the run folder; its name is also the folder's below `checkpoints.upload`.
            say: gets a sentence about a failure, from the thread.
        """
        self._run = run
        self._checkpoints = checkpoints
        self._say = say
        self._url = checkpoints.upload
        self._files, root = filesystem(self._url)
        self._place = posixpath.join(root, run.name)
        self._best: Collection[int] = ()
        self._waiting: Queue[Path | None] = Queue()
        """None: the end of the run."""
        self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Path, best: Collection[int] = ()) -> None:
        """Copy a finished checkpoint folder, without waiting; `best` as in `retained`."""
        self._best = best
        if self._waiting.qsize() == WAITING:
            with suppress(Empty):  # the thread has taken it now
                oldest = self._waiting.get_nowait()
                assert oldest is not None  # nothing is submitted after the end
                self._say(f"{oldest.name} is not copied to {self._url}: copying is slower than training")
        self._waiting.put(checkpoint)

    def close(self, *, seconds: float) -> None:
        """Copy waiting checkpoints and the run's results, for at most `seconds`, and end the thread."""
        self._waiting.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(f"the end of the run was not all copied to {self._url} within {seconds:g} s; it is here")

    def _work(self) -> None:
        while True:
            checkpoint = self._waiting.get()
            name = checkpoint.name if checkpoint else "the end of the run"
            try:
                if checkpoint:
                    self._copy(checkpoint)
                else:
                    self._copy_end()
            except Exception as error:  # each filesystem has its own errors, and training must go on
                reason = " ".join(str(error).split()) or type(error).__name__
                self._say(f"{name} was not copied to {self._url}: {reason}")
            if checkpoint is None:
                return

    def _copy_end(self) -> None:
        for name in END:
            path = self._run / name
            for file in sorted(path.rglob("*") if path.is_dir() else [path]):
                if file.is_file():
                    there = posixpath.join(self._place, file.relative_to(self._run).as_posix())
                    self._files.makedirs(posixpath.dirname(there), exist_ok=True)
                    self._files.put_file(str(file), there)

    def _copy(self, checkpoint: Path) -> None:
        number = number_of(checkpoint.name)
        there = self._there()
        # A run resumed from an earlier checkpoint makes the later ones again.
        for later in (n for n in there if n >= number):
            self._remove(there[later])
        folder = posixpath.join(self._place, "checkpoints", checkpoint.name)
        self._files.makedirs(folder, exist_ok=True)
        for file in sorted(checkpoint.iterdir()):
            if file.name != MANIFEST:
                self._files.put_file(str(file), posixpath.join(folder, file.name))
        # A checkpoint of 0 updates may be there before anything was measured.
        for name in (name for name in (*BESIDE, TRACKED) if (self._run / name).is_file()):
            self._files.put_file(str(self._run / name), posixpath.join(self._place, name))
        self._files.put_file(str(checkpoint / MANIFEST), posixpath.join(folder, MANIFEST))
        there = self._there()
        for old in there.keys() - retained(there, self._checkpoints, self._best):
            self._remove(there[old])

    def _there(self) -> dict[int, str]:
        """Updates → path of the checkpoints copied before."""
        place = posixpath.join(self._place, "checkpoints")
        self._files.invalidate_cache(place)
        if not self._files.isdir(place):
            return {}
        paths = self._files.ls(place, detail=False)
        named = ((number_of(posixpath.basename(path.rstrip("/"))), path) for path in paths)
        return {number: path for number, path in named if number >= 0}

    def _remove(self, folder: str) -> None:
        """The manifest first: a half-removed folder must not look like a checkpoint."""
        manifest = posixpath.join(folder, MANIFEST)
        if self._files.exists(manifest):
            self._files.rm_file(manifest)
        self._files.rm(folder, recursive=True)


def number_of(name: str) -> int:
    """20 of ``iteration-000020``; -1 for another name."""
    match = re.fullmatch(r"iteration-([0-9]{6,})", name)
    return int(match[1]) if match else -1
