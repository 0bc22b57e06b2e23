"""Journal of an iteration's decisions: an append-only file that stays readable if it is cut off anywhere.

Each line is a JSON object, preceded by the CRC-32 of its text::

    5f3c0a11 {"kind":"explore","unit":"explore/3/9f…/0-23",…}

A line is valid if it is complete and its checksum matches. Reading stops at the first invalid line; the work of this
and all later lines is repeated. A tail that was cut off was never acknowledged. `Journal.damaged` reports complete
lines that the disk has damaged. Before appending, an invalid tail is truncated.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from solrl_ray.common.files import check_regular, make_folder, naming, read_regular, sync, sync_folder

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class Journal:
    """Journal of one iteration. Only one process may use it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._together = False
        self._synced = True

    def entries(self) -> list[dict[str, Any]]:
        """All valid entries, oldest first; empty if the file does not exist yet."""
        return [entry for entry, _ in self._scan()]

    def recover(self) -> list[dict[str, Any]]:
        """Sync the file to the disk and return all valid entries, oldest first.

        The sync is needed because a killed process may not have synced its last entry. The entries may be acknowledged
        once the folder is synced too.
        """
        if self.path.exists():
            check_regular(self.path)  # opening a pipe, for example, could block forever
            sync(self.path, self._file or self._open())
        return self.entries()

    def damaged(self) -> tuple[int, int] | None:
        """Number of the first damaged line, and number of complete lines after it, which are not read either.

        None if all lines are valid, or if only the last one was cut off. (Such a line was never acknowledged.)
        """
        valid = len(self.entries())
        lines = read_regular(self.path).split(b"\n") if self.path.exists() else [b""]
        complete = len(lines) - 1
        return (valid + 1, complete - valid - 1) if complete > valid else None

    def append(self, *entries: dict[str, Any]) -> None:
        """Append entries, and wait until they are on the disk. Inside `together`, its end waits."""
        with naming(self.path):
            file = self._file or self._open()
            file.write(b"".join(_line(entry) for entry in entries))
            file.flush()
        self._synced = False
        if not self._together:
            self._sync()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Sync once at the end of the block, instead of after each `append` in it."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            if not self._synced:
                self._sync()

    def set_aside(self) -> Path:
        """Rename the file to ``….stale``, which leaves the journal empty; returns the new path."""
        self.close()
        stale = self.path.with_name(f"{self.path.name}.stale")
        self.path.replace(stale)
        sync_folder(self.path.parent)
        return stale

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _sync(self) -> None:
        assert self._file is not None
        with naming(self.path):
            sync(self.path, self._file)
        self._synced = True

    def _open(self) -> IO[bytes]:
        make_folder(self.path.parent)
        created = not self.path.exists()
        end = 0
        for _, position in self._scan():
            end = position
        self._file = self.path.open("ab")
        self._file.truncate(end)
        if created:
            sync_folder(self.path.parent)
        return self._file

    def _scan(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each valid entry with the file position after it."""
        if not self.path.exists():
            return
        check_regular(self.path)
        position = 0
        with self.path.open("rb") as file:
            for line in file:
                entry = parsed(line)
                if entry is None:
                    return
                position += len(line)
                yield entry, position


def _line(entry: dict[str, Any]) -> bytes:
    text = _ENCODER.encode(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line into its entry; None if the line is invalid."""
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    entry: dict[str, Any] = json.loads(text)
    return entry
