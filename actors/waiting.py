"""The only place that waits for Ray. Every wait has a deadline, a name and a diagnosis (design law 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from solrl_ray.errors import RunError, UserError

LOST = (RayActorError, ActorUnavailableError, WorkerCrashedError, NodeDiedError, ObjectLostError)
"""What it looks like when the other side is gone. A retry is ours to make: Ray's own would repeat without ids."""


def get(ref: Any, *, what: str, seconds: float) -> Any:
    """The value of `ref`.

    Args:
        what: the wait's name, as the subject of a sentence: ``evaluation of prompt 9f…``.
        seconds: the deadline.

    Raises:
        RunError: the deadline passed, the worker died, or it failed with an error that is not the user's.
        UserError: the worker found bad input.
    """
    try:
        return ray.get(ref, timeout=seconds)
    except GetTimeoutError:
        raise RunError(f"{what} did not finish within its deadline of {seconds:g} s") from None
    except LOST as error:
        raise RunError(f"{what} failed because its worker is gone: {first_line(error)}") from error
    except RayTaskError as error:
        raise translated(error, what) from error


def first_ready(refs: Sequence[Any], *, seconds: float) -> list[Any]:
    """Those of `refs` that are ready, waiting at most `seconds` for the first one; may be empty."""
    if not refs:
        return []
    ready, _ = ray.wait(list(refs), num_returns=1, timeout=seconds, fetch_local=False)
    if ready:  # take along whatever else is there already
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
    return ready


def translated(error: RayTaskError, what: str) -> Exception:
    """A remote failure as one of our errors: ours pass through with their one sentence, others get the name."""
    cause = error.cause
    if isinstance(cause, UserError | RunError):
        return cause
    return RunError(f"{what} failed: {type(cause).__name__}: {first_line(cause)}")


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
