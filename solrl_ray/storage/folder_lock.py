"""The lock of a run folder: which process writes there."""

from __future__ import annotations

import os
import time
from io import FileIO
from pathlib import Path

from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, claim
from solrl_ray.errors import UserError


class FolderLock:
    """One process at a time holds it, until it releases it or ends.

    Between the driver and the controller of a run nobody does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "lock"
        self._file: FileIO | None = None

    def acquire(self, *, seconds: float) -> None:
        """Claim the folder for this process, until the process ends.

        Waits up to `seconds`: a killed driver's cluster needs a moment to end. Raises UserError if the folder is in
        use, or cannot be written.
        """
        try:
            # Unbuffered, so that closing it writes nothing and cannot fail again.
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
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def held(self) -> bool:
        """Whether a process works here now. Raises RunError if the disk hangs."""
        return in_time(self._is_held, what=f"looking at {self._path}", seconds=READ_SECONDS)

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
                    raise UserError(f"the run folder {self._folder} is in use by {holder}") from None
                time.sleep(0.2)


def unwritable(folder: Path, error: OSError) -> UserError:
    where = f" ({error.filename})" if error.filename else ""
    return UserError(f"the run folder {folder} cannot be written: {error.strerror or error}{where}")
