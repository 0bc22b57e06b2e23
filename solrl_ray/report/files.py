"""Whole files or none: what is written here is complete under its final name, or is not there."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` beside `path`, flushes it to the disk and renames it into place.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full; `path` is untouched then.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
