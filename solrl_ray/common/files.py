"""Writes whole files and folders or none: a final name is complete and on the disk.

Incomplete ones are called ``.<name>.partial``; `remove_partial` removes those of a killed process.

A path may be on another kind of disk, such as `tests.simulated.memory_disk.MemoryPath`. Such a disk registers its
own versions of the functions at the end.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, singledispatch
from pathlib import Path
from typing import IO, Any

from solrl_ray.errors import UserError

READ_SECONDS = 60.0
"""Deadline of a read for information only."""
MOST_BYTES = 2**30
"""Size of the largest file that is read at once, unless its reader says otherwise."""


def check_regular(file: Path, most: float = MOST_BYTES) -> int:
    """The size of a regular file. Opening a pipe may block, and a device may never end, so neither is opened.

    Raises OSError: it is missing, of another kind, or has more than `most` bytes.
    """
    try:
        status = file.stat()
    except ValueError:  # a zero byte, which no name of a file has
        raise FileNotFoundError(errno.ENOENT, "no file has such a name", str(file)) from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, "it is a pipe or a device, not a regular file", str(file))
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, and at most {most:,} are read", str(file))
    return status.st_size


def read_regular(file: Path, most: float = MOST_BYTES) -> bytes:
    """The content of a regular file. Raises OSError as `check_regular`."""
    size = check_regular(file, most)
    with file.open("rb") as opened:
        return opened.read(max(size, 1))  # files of /proc state 0 bytes, and some of them never end


def stand_in(content: bytes) -> str:
    """What lies where another file was meant to be downloaded, and what to do; empty if it is none of the known."""
    begin = content[:200].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if begin.startswith(b"version https://git-lfs.github.com/spec/"):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"
    if begin.startswith((b"<!doctype html", b"<html")):
        return "is an HTML page, such as that of a login or an error; download the file itself"
    return ""


def utf8_text(file: Path, said: str, most: float = MOST_BYTES) -> str:
    """The file's text. Raises OSError as `check_regular`, UserError as `decoded`."""
    return decoded(read_regular(file, most), said)


def decoded(content: bytes, said: str) -> str:
    """The text of a file's content. Raises a UserError that begins with `said`: it is a `stand_in`, or has a line that
    is not UTF-8, which is named.
    """
    if wrong := stand_in(content):
        raise UserError(f"{said} {wrong}.")
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()  # any kind of line end becomes \n
    except UnicodeDecodeError as error:
        bad, line = error.object[error.start : error.end], error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{said}, line {line}, is not UTF-8 text: it has the bytes {bad!r}; save it as UTF-8."
        ) from error


def replace_file(path: Path, content: bytes, *, synced: bool = True) -> None:
    """Write `content` beside `path`, sync it to the disk and rename it into place. Makes missing folders.

    `synced`: whether to wait for the disk. If not, a power failure may leave another content under the name: for what
    each reader verifies and can make again.

    Raises OSError that names `path` or the folder that cannot be made.
    """
    make_folder(path.parent)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if synced:
            write_synced(partial, content)
        else:
            with partial.open("wb") as file:
                file.write(content)
        partial.replace(path)
        if synced:
            sync_folder(path.parent)
    except OSError as error:
        raise _refusal(error, path) from error
    finally:
        with suppress(OSError):
            partial.unlink()


def located(path: str | Path, key: str) -> Path:
    """`path` with its ``~`` or ``~name`` expanded. Raises UserError naming `key` if no such path or home can exist."""
    if "\0" in str(path):
        raise UserError(f"{key} is {str(path)!r}, but no path has a zero byte; remove it.")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        home = str(path).partition("/")[0]
        raise UserError(
            f"{key} is {str(path)!r}, but this machine knows no home {home}; write its whole path."
        ) from None


def read_json(path: Path, mend: str = "") -> Any:
    """The content of a JSON file. Raises UserError if it cannot be read or is damaged, with its name and how to `mend`
    it.
    """
    mend = f"; {mend}" if mend else ""
    try:
        content = read_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}{mend}.") from error
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        if wrong := stand_in(content):
            raise UserError(f"{path} {wrong}.") from error
        raise UserError(f"{path} is not JSON: {error}{mend}.") from error


def replace_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files and subfolders; it appears (or is replaced) when all is on the disk."""
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError in this block that names no file, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, each synced to the disk, unless it exists. Other processes may make it at the same
    time.

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
    """Why `path` cannot be written. Some folders that take no files, such as /proc, say that the file is missing."""
    if error.errno == errno.ENOENT:
        return PermissionError(errno.EPERM, "its folder takes no files, or is gone", str(path))
    return OSError(error.errno, error.strerror, str(path))


def refuses_files(folder: Path) -> str:
    """Why an existing folder cannot hold files; empty if it can, unless its disk is full. Leaves nothing behind."""
    if not folder.is_dir():
        return "is a file"
    probe = folder / f".{secrets.token_hex(8)}.partial"
    try:
        with probe.open("xb") as file:
            claim(folder, file, alone=True)
    except FileNotFoundError:
        return "takes no files"  # such as /proc
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            return f"is on a disk without file locks ({error.strerror}), which a run folder needs; choose another disk"
        return f"cannot be written: {error.strerror}"
    finally:
        with suppress(OSError):
            probe.unlink()
    return ""


def lacks_space(folder: Path, wanted_gb: float) -> str:
    """What is wrong if the disk of `folder`, which need not exist, has less free space; else empty.

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
    """Remove the partial files and folders below `folder`; no process may be writing there."""
    for left in list(folder.rglob(".*.partial")):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file, or a folder and its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        for each in list(path.iterdir()):
            remove(each)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        sync(path, file)


# Differs between kinds of disks


@singledispatch
def sync(path: Path, file: IO[Any]) -> None:
    """Return when the data flushed to `file`, which is open at `path`, is on the disk."""
    os.fsync(file.fileno())


@singledispatch
def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk; this completes a rename.

    Some shares sync files and refuse folders. There, nothing is known of names after a power failure, and a run may go
    on from an earlier checkpoint, whose bytes its checksums prove.
    """
    if not syncs_names(folder):
        tell_once(f"the disk of the run {NO_NAMES}")


NO_NAMES = "does not sync names of files: after a power failure, a run may go on from an earlier checkpoint"


@cache
def tell_once(note: str) -> None:
    """Print a note for the user, unless this process has."""
    print(f"note: {note}", file=sys.stderr, flush=True)


def syncs_names(folder: Path) -> bool:
    """Sync the names in `folder`; false if its disk knows no such call. Raises OSError for any other error."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise OSError(error.errno, error.strerror, str(folder)) from error
        return False
    finally:
        os.close(descriptor)
    return True


@singledispatch
def free_bytes(folder: Path) -> int:
    """Free space on the disk of an existing folder."""
    return shutil.disk_usage(folder).free


@singledispatch
def claim(path: Path, file: IO[Any], *, alone: bool) -> None:
    """Lock `file`, which is open at `path`, for this process until it is closed; shared if not `alone`.

    Raises BlockingIOError if another process has it.
    """
    fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
