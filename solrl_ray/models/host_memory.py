"""Host memory for weights that are laid down. What several workers of a machine hold is there once.

Regenerator and learner have the same frozen base, and so have all ranks and all explorers of a machine. The first who
lays it down makes a copy that the others find by its checksums, compare byte by byte, and use as theirs::

    worker A   makes a file in memory ──► a note: pid, descriptor, inode; content ──► offset
    worker B   reads the note, maps /proc/PID/fd/DESCRIPTOR, writes a note of its own

The file has no name (`memfd_create`). The kernel frees it when the last process that has it ends, also if that is
killed. Only notes can be left over; they are a few kilobytes, and the next worker removes them. Where there is no such
file (another system than Linux, workers in other containers), each worker has a copy of its own.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solrl_ray.errors import RunError

Content = tuple[int, int]
"""Bytes and checksum of a piece: what it is looked for by."""
Index = dict[Content, int]
"""Where a room has what, in bytes."""


class Room:
    """Host memory; if pinned, a GPU copies from and to it at the full speed of its link. PyTorch's own allocator of
    pinned memory would round the size up to a power of two.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        """Raises RunError if there is not enough memory."""
        try:
            self.bytes = self._allocated(size)
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            raise _missing(size, "out of memory") from error
        if pinned and size:
            _pin(self, self.bytes)

    def _allocated(self, size: int) -> Tensor:
        """Uint8 [size], with any content."""
        return torch.empty(size, dtype=torch.uint8)


class SharedRoom(Room):
    """A room in a file that other processes can map. After it is noted, nobody writes to it."""

    def __init__(self, size: int, *, pinned: bool, descriptor: int = -1) -> None:
        """
        Args:
            descriptor: of an open file of another process, which is mapped; by default a new one is made.

        Raises:
            RunError: there is not enough memory.
        """
        self._new = descriptor < 0
        self.descriptor = descriptor
        super().__init__(size, pinned=pinned)

    def _allocated(self, size: int) -> Tensor:
        if self._new:
            self.descriptor = os.memfd_create("solrl-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        if self._new:
            os.ftruncate(self.descriptor, size)
        return torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Found:
    """A piece in a room."""

    room: SharedRoom
    offset: int


class SharedRooms:
    """The rooms of this machine and user that one worker made or found."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where notes are; by default one of the user's in the temporary folder."""
        self._folder = folder or Path(tempfile.gettempdir()) / f"solrl_ray-{os.getuid()}-rooms"
        self._mine: weakref.WeakValueDictionary[int, SharedRoom] = weakref.WeakValueDictionary()
        """By inode."""

    def make(self, size: int, *, pinned: bool) -> SharedRoom | None:
        """A room that nobody knows of yet; None if it cannot be had: memory of the worker's own may do then."""
        if not hasattr(os, "memfd_create") or not Path("/proc/self/fd").is_dir():
            return None
        with contextlib.suppress(OSError, RunError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            return SharedRoom(size, pinned=pinned)
        return None

    def offer(self, room: SharedRoom, index: Index) -> None:
        """Let others find what is in a room from now on."""
        inode = os.fstat(room.descriptor).st_ino
        if inode in self._mine:
            return
        content = {f"{size} {checksum}": offset for (size, checksum), offset in index.items()}
        note = {"pid": os.getpid(), "descriptor": room.descriptor, "inode": inode, "size": room.bytes.numel()}
        path = self._folder / f"{os.getpid()}-{inode}.json"
        with contextlib.suppress(OSError):  # nobody finds it then
            unfinished = path.with_suffix(".new")
            unfinished.write_text(json.dumps(note | {"index": content}))
            unfinished.replace(path)
            weakref.finalize(room, path.unlink, missing_ok=True)
        self._mine[inode] = room

    def find(self, wanted: Collection[Content], *, pinned: bool) -> dict[Content, Found]:
        """Which of these contents living processes have, by their checksums; a room is mapped if it has one."""
        found: dict[Content, Found] = {}
        for note in self._notes():
            index = {_content(key): offset for key, offset in note["index"].items()}
            if missing := [content for content in wanted if content in index and content not in found]:
                room = self._mine.get(note["inode"]) or _mapped(note, pinned)
                if room is not None:
                    self.offer(room, index)
                    found |= {content: Found(room, index[content]) for content in missing}
        return found

    def _notes(self) -> Iterator[dict[str, Any]]:
        """Those of living processes; others are removed."""
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                note: dict[str, Any] = json.loads(path.read_text())
                if Path(f"/proc/{note['pid']}").exists():
                    yield note
                else:
                    path.unlink(missing_ok=True)


def _content(key: str) -> Content:
    size, checksum = key.split()
    return int(size), int(checksum)


def _mapped(note: dict[str, Any], pinned: bool) -> SharedRoom | None:
    """The room of a note; None if its process has ended, or is another one by now, or its file cannot be had."""
    try:
        descriptor = os.open(f"/proc/{note['pid']}/fd/{note['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    there = os.fstat(descriptor)
    if (there.st_ino, there.st_size) != (note["inode"], note["size"]):
        os.close(descriptor)
        return None
    with contextlib.suppress(RunError):
        return SharedRoom(note["size"], pinned=pinned, descriptor=descriptor)
    return None


def _pin(room: Room, content: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    address = content.data_ptr()
    if error := int(runtime.cudaHostRegister(address, content.numel(), 0)):
        raise _missing(content.numel(), f"it cannot be pinned: CUDA error {error}")
    # Before the memory goes: else its address could not be pinned again.
    weakref.finalize(room, runtime.cudaHostUnregister, address).atexit = False


def _missing(size: int, reason: str) -> RunError:
    return RunError(
        f"{size / 1e9:.1f} GB of host memory for weights that are laid down cannot be allocated ({reason}); "
        "set fleet.sharing to keep, or give the node more memory"
    )
