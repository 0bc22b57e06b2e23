"""Whole files and folders or none: what has its final name is complete and on the disk.

What is not complete yet is called ``.<name>.partial``; `remove_partial` clears away what a killed process left.

A path may be one of another disk, such as `solrl_ray.simulator.memory_disk.MemoryPath`. What differs from disk to disk
beyond `Path`'s own methods are the functions at the end, which other disks register their own for.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import singledispatch
from pathlib import Path
from typing import IO, Any

from solrl_ray.errors import UserError

READ_SECONDS = 60.0
"""How long who only wants to know something waits for a disk."""


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, flush it to the disk and rename it into place. Makes missing folders.

    Raises OSError that names `path` or the folder that cannot be made.
    """
    make_folder(path.parent)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write_synced(partial, content)
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise _refusal(error, path) from error
    finally:
        with suppress(OSError):
            partial.unlink()


def read_json(path: Path, mend: str = "") -> Any:
    """What a JSON file holds. Raises UserError that names it, and says how to `mend` it, if it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}{f'; {mend}' if mend else ''}.") from error


def replace_folder(folder: Path, contents: Mapping[str, bytes | Sequence[bytes | memoryview]]) -> None:
    """Write a folder of files, some in folders of their own; it appears (or is replaced) when all is on the disk.

    `contents`: of each file, whole or in pieces that follow each other.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    remove(partial)
    make_folder(partial)
    for name, content in contents.items():
        make_folder((partial / name).parent)
        write_synced(partial / name, content)
    sync_folder(partial)
    remove(folder)
    partial.rename(folder)
    sync_folder(folder.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each of them on the disk; nothing to do if it is there. Others may
    make it at the same time.

    Raises OSError if it cannot be made, NotADirectoryError if a file is in the way.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(folder)) from None
    except OSError as error:
        raise _refusal(error, folder) from error
    sync_folder(folder.parent)


def _refusal(error: OSError, path: Path) -> OSError:
    """Why `path` cannot be written. A folder that takes no files, such as /proc, says that they are not there."""
    if error.errno == errno.ENOENT:
        return PermissionError(errno.EPERM, "its folder takes no files, or is gone", str(path))
    return OSError(error.errno, error.strerror, str(path))


def refuses_files(folder: Path) -> str:
    """Why nothing can be kept in what is there; empty if something can, unless its disk is full. Leaves nothing."""
    if not folder.is_dir():
        return "is a file"
    probe = folder / f".{secrets.token_hex(8)}.partial"
    try:
        probe.open("xb").close()
    except FileNotFoundError:
        return "takes no files"  # such as /proc
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    finally:
        with suppress(OSError):
            probe.unlink()
    return ""


def lacks_space(folder: Path, wanted_gb: float) -> str:
    """What is wrong with the place of `folder`, which need not be there yet, if it has not so much free; else empty.

    `wanted_gb`: `checkpoints.min_free_gb`.
    """
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free_gb = free_bytes(existing) / 1e9
    if free_gb >= wanted_gb:
        return ""
    if problem := refuses_files(existing):
        return f"{existing} {problem}"
    return f"its disk has {free_gb:.2f} GB free; checkpoints.min_free_gb asks for {wanted_gb:g} GB"


def remove_partial(folder: Path) -> None:
    """Remove the partial files and folders below `folder`; nobody may be writing there."""
    for left in list(folder.rglob(".*.partial")):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; nothing to do if it is not there."""
    if path.is_dir() and not path.is_symlink():
        for each in list(path.iterdir()):
            remove(each)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes | Sequence[bytes | memoryview]) -> None:
    with path.open("wb") as file:
        for piece in [content] if isinstance(content, bytes) else content:
            file.write(piece)
        file.flush()
        sync(path, file)


# What differs from disk to disk


@singledispatch
def sync(path: Path, file: IO[Any]) -> None:
    """Return when what was flushed to `file`, which is open at `path`, is on the disk."""
    os.fsync(file.fileno())


@singledispatch
def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk: a rename is when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@singledispatch
def free_bytes(folder: Path) -> int:
    """What the disk of an existing folder has room for."""
    return shutil.disk_usage(folder).free


@singledispatch
def claim(path: Path, file: IO[Any], *, alone: bool) -> None:
    """Lock `file`, which is open at `path`, for this process until it is closed; with others if not `alone`.

    Raises BlockingIOError if another process has it.
    """
    fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
