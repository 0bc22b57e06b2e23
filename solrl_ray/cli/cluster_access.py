"""Whether a Ray cluster takes this user, and whether this machine has GPUs, without starting or joining anything."""

from __future__ import annotations

import os
from pathlib import Path

from solrl_ray.common import ray_auth
from solrl_ray.errors import RunError

CONNECT_SECONDS = 1.5
ANSWER_SECONDS = 10.0
"""A busy head may answer late. `CONNECT_SECONDS` limits only the connection."""


def cluster_at(address: str) -> None:
    """Raise RunError if no Ray answers at `address` or it refuses this user's token, UserError if it is a URL."""
    try:
        ray_auth.check_access(address, seconds=CONNECT_SECONDS, answer_seconds=ANSWER_SECONDS)
    except (OSError, ValueError) as error:
        raise RunError(f"the Ray cluster at {address} could not be joined: {error}") from error


def has_gpus() -> bool:
    """Whether this machine has a GPU that this process may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or Path("/dev/kfd").exists()
