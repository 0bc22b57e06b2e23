"""A disk in memory that loses unsynced data when its machine loses power.

`MemoryPath` has the methods of `pathlib.Path` that the run folder's code uses, and registers its own versions of
`solrl_ray.common.files`' functions. Every file knows which bytes are on the disk, and every folder which entries are:
POSIX promises the bytes of a file after its own sync, and a new, renamed or removed entry after its folder's.
`MemoryDisk.lose_power` keeps that. Of later changes it keeps as much as a seed says: the first changes of each folder,
and the first bytes of each file, cut off anywhere.
"""

from __future__ import annotations

import errno
import io
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import IO, Any

from solrl_ray.common import files

Names = tuple[str, ...]
"""A path from the root."""


class PowerLoss(BaseException):
    """The process that uses the disk has ended in the middle of an operation. No code may continue after it."""


@dataclass(slots=True, eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    locked: bool = False
    unreadable: bool = False
    """Whether a block of it is bad."""

    def lose_power(self, chance: random.Random) -> None:
        kept = self.synced if self.data.startswith(self.synced) else b""  # else it was rewritten from the beginning
        self.synced = bytes(self.data[: chance.randint(len(kept), len(self.data))])
        self.data = bytearray(self.synced)
        self.locked = False


@dataclass(slots=True, eq=False)
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    changes: list[dict[str, _File | _Folder | None]] = field(default_factory=list)
    """Unsynced changes. A change maps names to their new entries; it happens completely or not at all."""

    def change(self, change: dict[str, _File | _Folder | None]) -> None:
        self.changes.append(change)
        _apply(self.entries, change)

    def sync(self) -> None:
        self.synced, self.changes = dict(self.entries), []

    def lose_power(self, chance: random.Random) -> None:
        for change in self.changes[: chance.randint(0, len(self.changes))]:
            _apply(self.synced, change)
        self.entries, self.changes = dict(self.synced), []
        for node in self.entries.values():
            node.lose_power(chance)


def _apply(entries: dict[str, _File | _Folder], change: dict[str, _File | _Folder | None]) -> None:
    for name, node in change.items():
        entries.pop(name, None)
        if node is not None:
            entries[name] = node


def _names(path: str) -> Names:
    return tuple(name for name in path.split("/") if name not in ("", "."))


class MemoryDisk:
    def __init__(self) -> None:
        self._root = _Folder()
        self.before: Callable[[str], None] = lambda operation: None
        """Called with the name of each operation that changes or syncs something; it may raise OSError or PowerLoss."""
        self.user = ""
        """The process that uses it now."""
        self.gone: set[str] = set()
        """Ended processes: data in the buffers of their open files is never written."""
        self.touched: set[Names] = set()
        """Files and folders whose name or content has changed; whoever wants to know clears it."""

    def path(self, path: str) -> MemoryPath:
        """The path of an absolute path string."""
        return MemoryPath(self, _names(path))

    def lose_power(self, seed: int, path: str = "/") -> None:
        """Keep the synced data below `path`, and of the rest as much as `seed` says. Releases all locks."""
        node = self.node(_names(path))
        if node is not None:
            node.lose_power(random.Random(seed))

    def durable(self, path: str) -> bytes | None:
        """Bytes of a file that would surely survive a loss of power now; None if it might be missing."""
        node = self._synced(_names(path))
        return node.synced if isinstance(node, _File) else None

    def at_risk(self) -> list[str]:
        """What is there of `touched` and might be missing, or have another content, after a loss of power now."""
        there = {names: node for names in self.touched if (node := self.node(names)) is not None}
        lost = [
            names
            for names, node in there.items()
            if self._synced(names) is not node or (isinstance(node, _File) and node.synced != node.data)
        ]
        return sorted("/" + "/".join(names) for names in lost)

    def damage(self, path: str, chance: random.Random) -> None:
        """Give a file another byte, or a block that cannot be read."""
        file = self.node(_names(path))
        if chance.random() < 0.5:
            file.unreadable = True
        else:
            self.alter(path, chance)

    def alter(self, path: str, chance: random.Random) -> None:
        """Give a file another byte."""
        file = self.node(_names(path))
        file.data[chance.randrange(len(file.data))] ^= 1 << chance.randrange(8)
        file.synced = bytes(file.data)

    def _synced(self, names: Names) -> Any:
        node: Any = self._root
        for name in names:
            node = node.synced.get(name) if isinstance(node, _Folder) else None
        return node

    def node(self, names: Names) -> Any:
        """The file or folder at this path; None if there is none."""
        node: Any = self._root
        for name in names:
            node = node.entries.get(name) if isinstance(node, _Folder) else None
        return node


class MemoryPath:
    """As `pathlib.Path`, on a `MemoryDisk`; absolute."""

    def __init__(self, disk: MemoryDisk, names: Names) -> None:
        self.disk, self.names = disk, names

    def __truediv__(self, path: str) -> MemoryPath:
        return MemoryPath(self.disk, self.names + _names(path))

    def __str__(self) -> str:
        return "/" + "/".join(self.names)

    def __repr__(self) -> str:
        return f"MemoryPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryPath) and (self.disk, self.names) == (other.disk, other.names)

    def __hash__(self) -> int:
        return hash(self.names)

    def __lt__(self, other: MemoryPath) -> bool:
        return self.names < other.names

    @property
    def name(self) -> str:
        return self.names[-1] if self.names else ""

    @property
    def parent(self) -> MemoryPath:
        return MemoryPath(self.disk, self.names[:-1])

    @property
    def parents(self) -> list[MemoryPath]:
        return [MemoryPath(self.disk, self.names[:count]) for count in reversed(range(len(self.names)))]

    def with_name(self, name: str) -> MemoryPath:
        return self.parent / name

    def absolute(self) -> MemoryPath:
        return self

    resolve = absolute

    # Reading

    def exists(self) -> bool:
        return self.disk.node(self.names) is not None

    def is_file(self) -> bool:
        return isinstance(self.disk.node(self.names), _File)

    def is_dir(self) -> bool:
        return isinstance(self.disk.node(self.names), _Folder)

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> os.stat_result:
        """Has only the kind and the size."""
        return os.stat_result((stat.S_IFREG, 0, 0, 0, 0, 0, len(self._file().data), 0, 0, 0))

    def iterdir(self) -> Iterator[MemoryPath]:
        return iter([self / name for name in self.folder().entries])

    def glob(self, pattern: str) -> Iterator[MemoryPath]:
        first, _, rest = pattern.partition("/")
        for each in self.iterdir() if self.is_dir() else ():
            if fnmatchcase(each.name, first):
                yield from each.glob(rest) if rest else [each]

    def rglob(self, pattern: str) -> Iterator[MemoryPath]:
        yield from self.glob(pattern)
        for each in self.iterdir() if self.is_dir() else ():
            yield from each.rglob(pattern)

    def read_bytes(self) -> bytes:
        return bytes(_readable(self._file(), self).data)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    # Writing

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        if parents and not self.parent.exists():
            self.parent.mkdir(parents=True, exist_ok=True)
        if self.exists() and not (exist_ok and self.is_dir()):
            raise FileExistsError(errno.EEXIST, "File exists", str(self))
        if not self.exists():
            self._change("mkdir", {self.name: _Folder()})

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.exists():
            self._file()
            self._change("unlink", {self.name: None})

    def rmdir(self) -> None:
        if self.folder().entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(self))
        self._change("rmdir", {self.name: None})

    def rename(self, target: MemoryPath) -> MemoryPath:
        node, there = self.disk.node(self.names), self.disk.node(target.names)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        if isinstance(there, _Folder) and there.entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
        if self.parent != target.parent:
            raise NotImplementedError("a rename between folders is two changes, which a loss of power may part")
        self._change("rename", {self.name: None, target.name: node})
        return target

    replace = rename

    def open(self, mode: str = "r", buffering: int = -1) -> IO[Any]:
        """Modes ``r``, ``w``, ``a`` and ``a+``, with or without ``b``."""
        if "r" not in mode and not self.exists():
            self._change("create", {self.name: _File()})
        raw = _OpenFile(self, self._file(), appends="a" in mode)
        if mode.startswith("w"):
            raw.truncate(0)
        if buffering == 0:
            return raw  # type: ignore[return-value]
        binary = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8")

    def folder(self) -> _Folder:
        """Raises FileNotFoundError, NotADirectoryError."""
        node = self.disk.node(self.names)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        if not isinstance(node, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(self))
        return node

    def _file(self) -> _File:
        node = self.disk.node(self.names)
        if isinstance(node, _Folder):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(self))
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        assert isinstance(node, _File)
        return node

    def _change(self, operation: str, change: dict[str, _File | _Folder | None]) -> None:
        folder = self.parent.folder()
        self.disk.before(operation)
        folder.change(change)
        self.disk.touched |= {(*self.parent.names, name) for name in change}


def _readable(file: _File, path: MemoryPath) -> _File:
    if file.unreadable:
        raise OSError(errno.EIO, "Input/output error", str(path))
    return file


class _OpenFile(io.RawIOBase):
    """An open file. Closing it releases its lock."""

    def __init__(self, path: MemoryPath, node: _File, appends: bool) -> None:
        self._path, self.node, self._appends = path, node, appends
        self._position = len(node.data) if appends else 0
        self._user = path.disk.user
        self.holds = False

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, len(self.node.data))[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        chunk = _readable(self.node, self._path).data[self._position : self._position + len(buffer)]
        buffer[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)

    def write(self, content: Any) -> int:
        if self._user in self._path.disk.gone:
            return len(content)
        self._path.disk.before("write")
        if self._user == self._path.disk.user:  # else a dead process's file is closed
            self._path.disk.touched.add(self._path.names)
        if self._appends:
            self._position = len(self.node.data)
        self.node.data[self._position : self._position + len(content)] = content
        self._position += len(content)
        return len(content)

    def truncate(self, size: int | None = None) -> int:
        size = self._position if size is None else size
        if size != len(self.node.data):
            self._path.disk.before("truncate")
            self._path.disk.touched.add(self._path.names)
            del self.node.data[size:]
        return size

    def close(self) -> None:
        if self.holds:
            self.node.locked = self.holds = False
        super().close()


def _of_memory(operation: Any) -> Any:
    """Registers a function for this disk."""
    return operation.register(MemoryPath)


@_of_memory(files.sync)
def _sync(path: MemoryPath, file: IO[Any]) -> None:
    path.disk.before("sync")
    raw: Any = getattr(file, "raw", None) or file.buffer.raw  # type: ignore[attr-defined]
    raw.node.synced = bytes(raw.node.data)


@_of_memory(files.sync_folder)
def _sync_folder(folder: MemoryPath) -> None:
    folder.disk.before("sync")
    folder.folder().sync()


@_of_memory(files.free_bytes)
def _free_bytes(folder: MemoryPath) -> int:
    return 1 << 40


@_of_memory(files.claim)
def _claim(path: MemoryPath, file: Any, *, alone: bool) -> None:
    if file.node.locked and not file.holds:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    if alone:
        file.node.locked = file.holds = True
