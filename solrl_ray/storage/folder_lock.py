"""Lock of a run folder, so that only one process writes to it."""

from __future__ import annotations

import os
import time
from io import FileIO
from pathlib import Path

from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, claim
from solrl_ray.errors import UserError


class FolderLock:
    """A lock that one process holds until it releases it or ends.

    Between the driver's release and the controller's claim, no process of a run holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "lock"
        self._file: FileIO | None = None

    def acquire(self, *, seconds: float) -> None:
        """Claim the folder for this process.

        Waits up to `seconds`, because the cluster of a killed driver takes a moment to end. Raises UserError if the
        folder is still in use then, or if it cannot be written.
        """
        try:
            # Unbuffered, so that close() writes nothing and cannot fail after a failed write.
            file = self._path.open("a+b", buffering=0)
            try:
                self._claim(file, deadline=time.monotonic() + seconds)
                file.truncate(0)
                file.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
            except (OSError, UserError):
                file.close()
                raise
        except OSError as error:
            raise unwritable(self._folder, error) from None
        self._file = file

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def held(self) -> bool:
        """True if a process holds the lock now. Raises RunError if the disk hangs."""
        return in_time(self._is_held, what=f"checking the lock {self._path}", seconds=READ_SECONDS)

    def _is_held(self) -> bool:
        try:
            with self._path.open("rb") as file:
                claim(self._folder, file, alone=False)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _claim(self, file: FileIO, *, deadline: float) -> None:
        while True:
            try:
                claim(self._folder, file, alone=True)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    holder = file.read().decode().strip() or "another process"
                    raise UserError(
                        f"the run folder {self._folder} is in use by {holder}; wait for its end, or stop it"
                    ) from None
                time.sleep(0.2)


def unwritable(folder: Path, error: OSError) -> UserError:
    """The error for a run folder that cannot be written."""
    where = f" ({error.filename})" if error.filename else ""
    return UserError(f"the run folder {folder} cannot be written: {error.strerror or error}{where}")
