"""A folder of this user for tokens and caches where the home is unset or cannot be written, as in many containers."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from solrl_ray.errors import UserError


def settle() -> None:
    """Name a folder that can be written to Ray and to the libraries, by their variables, unless the user did.

    What lies in a home that can only be read is still read there. Raises UserError if there is no such folder.
    """
    try:
        home = Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(_private("unset"))
        return
    existing = next(place for place in (home, *home.parents) if place.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        return
    hub = home / ".cache" / "huggingface"
    if hub.is_dir():
        os.environ.setdefault("HF_HOME", str(hub))
    if not (home / ".ray" / "auth_token").is_file() and "RAY_AUTH_TOKEN" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(_token(_private(str(home)))))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TRITON_HOME"):
        if name not in os.environ:
            os.environ[name] = str(_private(str(home)))


def _private(home: str) -> Path:
    """A folder that only this user can read, in the folder for temporary files, where names are everybody's."""
    place = Path(tempfile.gettempdir()) / f"solrl-{os.getuid()}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return place
        reason = "is open to others"
    except OSError as error:
        reason = f"cannot be made: {error.strerror}"
    raise UserError(f"HOME is {home} and cannot be written, and {place} {reason}; set HOME to a folder of this user.")


def _token(folder: Path) -> Path:
    """A file with a token; Ray would make one only in the home."""
    file = folder / "auth_token"
    if not file.exists():
        made = folder / f"{secrets.token_hex(8)}.token"
        made.touch(0o600)
        made.write_text(secrets.token_hex(32))
        made.rename(file)
    return file
