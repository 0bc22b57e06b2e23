"""Reads files, and writes files and folders atomically: under its final name, each is complete and on the disk.

Incomplete ones are named ``.<name>.partial``; `remove_partial` removes those left by a killed process.

A path may be on another kind of disk, such as `tests.simulated.memory_disk.MemoryPath`. Such a disk registers its
own versions of the functions at the end of this module.
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
"""Deadline of a read that only informs the user."""
MOST_BYTES = 2**30
"""Size of the largest file that is read at once, unless a caller sets another limit."""


def check_regular(file: Path, most: float = MOST_BYTES) -> int:
    """The size of a regular file, bytes. Pipes and devices are refused: opening may block, and reading may never end.

    Raises OSError if the file is missing, of another kind, or has more than `most` bytes.
    """
    try:
        status = file.stat()
    except ValueError:  # a zero byte, which no file name can have
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
        return opened.read(max(size, 1))  # files in /proc claim to have 0 bytes, and some of them never end


def stand_in(content: bytes) -> str:
    """A description of a failed download, and the remedy: a Git LFS pointer or an HTML page; else empty."""
    begin = content[:200].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if begin.startswith(b"version https://git-lfs.github.com/spec/"):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"
    if begin.startswith((b"<!doctype html", b"<html")):
        return "is an HTML page, such as a login or error page; download the file itself"
    return ""


def utf8_text(file: Path, said: str, most: float = MOST_BYTES) -> str:
    """The file's text. Raises OSError as `check_regular`, UserError as `decoded`."""
    return decoded(read_regular(file, most), said)


def decoded(content: bytes, said: str) -> str:
    """The text of a file's content.

    Raises UserError, whose message begins with `said`, if the content is a `stand_in` or a line is not UTF-8.
    """
    if wrong := stand_in(content):
        raise UserError(f"{said} {wrong}.")
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()  # all line ends become \n
    except UnicodeDecodeError as error:
        bad, line = error.object[error.start : error.end], error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{said}, line {line}, is not UTF-8 text: it has the bytes {bad!r}; save it as UTF-8."
        ) from error


def replace_file(path: Path, content: bytes, *, synced: bool = True) -> None:
    """Write `content` to a partial file, sync it to the disk and rename it to `path`. Makes missing folders.

    `synced`: whether to wait for the disk. If not, a power failure may leave other content under the name. Use that
    only for files that every reader verifies and can recreate.

    Raises OSError that names `path`, or the folder that cannot be made.
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
    """`path` with ``~`` or ``~name`` expanded. Raises UserError naming `key` if such a path or home cannot exist."""
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
    """The content of a JSON file.

    Raises UserError if it cannot be read or is damaged. `mend` is added to the message; it says how to fix the file.
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
    """Write a folder of files and subfolders; it appears, or is replaced, once everything is on the disk."""
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
    """Add `path` to an OSError of the block that names no file, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, each synced to the disk. Other processes may do so at the same time.

    Raises OSError if it cannot be made, NotADirectoryError if a file has its name.
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
    """The error of a failed write, with `path`. Folders such as /proc report a missing file; this is corrected."""
    if error.errno == errno.ENOENT:
        return PermissionError(errno.EPERM, "its folder takes no files, or is gone", str(path))
    return OSError(error.errno, error.strerror, str(path))


def refuses_files(folder: Path) -> str:
    """The reason why an existing folder cannot hold files; empty if it can, or if its disk is full. Leaves no file."""
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
    """The problem, if the disk of `folder` has less than `wanted_gb` free; else empty. The folder need not exist.

    `wanted_gb`: `checkpoints.min_free_gb`.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_gb = free_bytes(existing) / 1e9
    if free_gb >= wanted_gb:
        return ""
    if problem := refuses_files(existing):
        return f"{existing} {problem}"
    return f"its disk has {free_gb:.2f} GB free; checkpoints.min_free_gb asks for {wanted_gb:g} GB"


def remove_partial(folder: Path) -> None:
    """Remove all partial files and folders below `folder`. No process may be writing there."""
    for partial in list(folder.rglob(".*.partial")):
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        for entry in list(path.iterdir()):
            remove(entry)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        sync(path, file)


# Functions that differ between kinds of disks


@singledispatch
def sync(path: Path, file: IO[Any]) -> None:
    """Wait until the data flushed to `file`, which is open at `path`, is on the disk."""
    os.fsync(file.fileno())


@singledispatch
def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, which completes a rename.

    Some network shares sync files but not folders. After a power failure there, names may be lost, and a run may
    continue from an earlier checkpoint; its checksums verify its bytes.
    """
    if not syncs_names(folder):
        tell_once(f"the disk of the run {NO_NAMES}")


NO_NAMES = "does not sync file names: after a power failure, a run may continue from an earlier checkpoint"


@cache
def tell_once(note: str) -> None:
    """Print a note for the user, once per process."""
    print(f"note: {note}", file=sys.stderr, flush=True)


def syncs_names(folder: Path) -> bool:
    """Sync the names in `folder`; False if its disk does not support it. Raises OSError for any other error."""
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
    """Free space on the disk of an existing folder, bytes."""
    return shutil.disk_usage(folder).free


@singledispatch
def claim(path: Path, file: IO[Any], *, alone: bool) -> None:
    """Lock `file`, which is open at `path`, for this process until it is closed; the lock is shared if not `alone`.

    Raises BlockingIOError if another process holds it.
    """
    fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
