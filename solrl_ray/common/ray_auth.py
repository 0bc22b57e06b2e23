"""How this process may speak to a Ray cluster: always with an explicit authentication mode.

Ray reads ``RAY_AUTH_MODE`` when it is first imported, and without it its commands disagree: a local start switches
tokens on, a job submission does not. So the mode is settled before. The token itself stays where Ray looks for it
(``RAY_AUTH_TOKEN``, the file of ``RAY_AUTH_TOKEN_PATH``, ``~/.ray/auth_token``) and enters no configuration, log or
run folder.
"""

from __future__ import annotations

import os
from pathlib import Path

MODE = "RAY_AUTH_MODE"


def settle(*, local: bool) -> str:
    """Set the mode in this process's environment unless the user did, and return it.

    Args:
        local: a local Ray is about to be started. Then tokens are on, and Ray makes one if there is none; on a
            cluster that is there already they are on if this user has a token.
    """
    mode = os.environ.get(MODE) or ("token" if local or _has_token() else "disabled")
    os.environ[MODE] = mode
    return mode


def _has_token() -> bool:
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()
