"""The decisions of an iteration, as an append-only file that survives being cut off anywhere.

One JSON object a line, preceded by the CRC-32 of its text::

    5f3c0a11 {"kind":"explore","unit":"explore/3/9f…/0-23",…}

A line is valid if it is complete and its checksum matches. Reading stops at the first invalid line; its work and that
of the lines after it is repeated. A tail that was cut off was never acknowledged. If a disk has damaged a complete
line, `Journal.damaged` says so. Appending first truncates an invalid tail.
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
    """The journal of one iteration, for one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._together = False
        self._synced = True

    def entries(self) -> list[dict[str, Any]]:
        """All valid entries, oldest first; empty if there is no file yet."""
        return [entry for entry, _ in self._scan()]

    def recover(self) -> list[dict[str, Any]]:
        """All valid entries, oldest first, after a sync to the disk, because a killed process may not have waited for
        its last one. They may be acknowledged once the folder is synced too.
        """
        if self.path.exists():
            check_regular(self.path)  # else to open it may take for ever
            sync(self.path, self._file or self._open())
        return self.entries()

    def damaged(self) -> tuple[int, int] | None:
        """The number of the first invalid line, and how many lines after it are left out as well; None if all are
        valid, or only the last was cut off, which was never acknowledged.
        """
        held = len(self.entries())
        lines = read_regular(self.path).split(b"\n") if self.path.exists() else [b""]
        complete = len(lines) - 1
        return (held + 1, complete - held - 1) if complete > held else None

    def append(self, *entries: dict[str, Any]) -> None:
        """Write entries and wait until they are on the disk; inside `together`, its end waits."""
        with naming(self.path):
            file = self._file or self._open()
            file.write(b"".join(_line(entry) for entry in entries))
            file.flush()
        self._synced = False
        if not self._together:
            self._sync()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait once, at the end, until all that is appended in the block is on the disk."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            if not self._synced:
                self._sync()

    def set_aside(self) -> Path:
        """Rename the file to ``….stale``, so that the journal is empty again; returns its new path."""
        self.close()
        stale = self.path.with_name(f"{self.path.name}.stale")
        self.path.replace(stale)
        sync_folder(self.path.parent)
        return stale

    def close(self) -> None:
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
        """Valid entries, each with the file position after it."""
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
    """The entry of a line; None if it is invalid."""
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    entry: dict[str, Any] = json.loads(text)
    return entry
