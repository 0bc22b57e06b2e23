"""A real file that the disk does not give."""

from pathlib import Path


def make_unreadable(path: Path) -> None:
    """From now on a read of `path` is an input/output error, as of a bad block: no process has memory at address 0."""
    path.unlink()
    path.symlink_to("/proc/self/mem")
