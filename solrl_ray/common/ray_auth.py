"""How this process may speak to a Ray cluster: always with an explicit authentication mode.

Ray reads ``RAY_AUTH_MODE`` when it is first imported, and without it its commands disagree: a local start switches
tokens on, a job submission does not. So the mode is settled before. The token itself stays where Ray looks for it
(``RAY_AUTH_TOKEN``, the file of ``RAY_AUTH_TOKEN_PATH``, ``~/.ray/auth_token``) and enters no configuration, log or
run folder.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from solrl_ray.errors import UserError

MODE = "RAY_AUTH_MODE"


def settle(*, local: bool) -> str:
    """Set the mode in this process's environment unless the user did, and return it.

    Args:
        local: a local Ray is about to be started. Then tokens are on, and Ray makes one if there is none; on a
            cluster that is there already they are on if this user has a token.
    """
    mode = os.environ.get(MODE) or ("token" if local or token() else "disabled")
    os.environ[MODE] = mode
    return mode


def knock(address: str, *, seconds: float) -> None:
    """Raise OSError if nobody listens at ``host:port``, of whom Ray itself would ask for minutes; UserError if it is
    the address of a dashboard."""
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"--address or RAY_ADDRESS is {address!r}, a dashboard, which is for solrl submit; it must be the Ray "
            "cluster's, such as head:6379."
        )
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def token() -> str:
    """This user's token, where Ray looks for it; empty if there is none."""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
