"""Waits for what actors answer. Every wait has a deadline, a name and a diagnosis (design law 8)."""

from __future__ import annotations

import errno
import re
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from solrl_ray.errors import RunError, UserError

LOST = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    LocalRayletDiedError,
    RaySystemError,
    ActorUnschedulableError,
    RuntimeEnvSetupError,
)
"""What it looks like when the other side is gone. A retry is ours to make: Ray's own would repeat without ids."""

_LOST_INPUT = (ObjectLostError, RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""Why a call could not be given an object that it was sent by reference."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_REASON_WIDTH = 400

GRACE = 30.0
"""How long after one call of a group has failed another one may turn out to be lost, seconds: Ray notices a dead node
later than those who were talking to it."""


class Gone(RunError):
    """A call that nobody will answer any more, though it may succeed elsewhere."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.what} failed: {self.reason}"


class WorkerGone(Gone):
    """The worker died, cannot be reached, or did not answer in time."""


class InputGone(Gone):
    """An object that the call was given by reference is lost; the worker itself is well."""


def get(ref: Any, *, what: str, seconds: float) -> Any:
    """The value of `ref`.

    Args:
        what: the wait's name, as the subject of a sentence: ``evaluation of prompt 9f…``.
        seconds: the deadline.

    Raises:
        WorkerGone: the deadline passed or the worker died.
        InputGone: what the worker was given is lost.
        RunError: the worker failed with an error that is not the user's.
        UserError: the worker found bad input.
    """
    try:
        return ray.get(ref, timeout=seconds)
    # First: Ray makes a worker's error an instance of its cause as well, whatever that is.
    except RayTaskError as error:
        raise translated(error, what) from error
    except GetTimeoutError:
        raise WorkerGone(what, f"no answer within its deadline of {seconds:g} s") from None
    except RayError as error:
        raise WorkerGone(what, f"its worker is gone: {first_line(error)}") from error


def get_together(refs: Sequence[Any], *, seconds: float) -> dict[Any, Any]:
    """The values of `refs` that are ready, for a fraction of what `get` costs for each.

    Empty if one of them has none, or does not arrive within `seconds`: then `get` tells which one, and why.
    """
    try:
        return dict(zip(refs, ray.get(list(refs), timeout=seconds) if refs else (), strict=True))
    except RayError:
        return {}


def gather(refs: Sequence[Any], *, what: str, seconds: float) -> list[Any]:
    """The values of `refs`, calls that depend on each other: for one that is lost, the others fail or hang.

    Raises as `get` does; a loss rather than what the others made of it, for which a failed call is held back for
    `GRACE` seconds.
    """
    deadline, failure = time.monotonic() + seconds, None
    found: dict[Any, Any] = {}
    pending = list(refs)
    while pending:
        ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
        if not ready:
            raise failure or WorkerGone(what, f"no answer within its deadline of {seconds:g} s")
        try:
            found[ready[0]] = get(ready[0], what=what, seconds=max(GRACE, deadline - time.monotonic()))
        except WorkerGone:
            raise
        except (RunError, UserError) as error:
            failure = failure or error
            deadline = min(deadline, time.monotonic() + GRACE)
    if failure is not None:
        raise failure
    return [found[ref] for ref in refs]


def first_ready(refs: Sequence[Any], *, seconds: float) -> list[Any]:
    """Those of `refs` that are ready, waiting at most `seconds` for the first one; may be empty."""
    if not refs:
        return []
    found = _ready_now(refs)  # where much happens, one look is enough
    if not found and ray.wait(list(refs), num_returns=1, timeout=seconds, fetch_local=False)[0]:
        found = _ready_now(refs)  # with whatever else is there by now
    return found


def _ready_now(refs: Sequence[Any]) -> list[Any]:
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
    return ready


def translated(error: RayTaskError, what: str) -> Exception:
    """A remote failure as one of our errors: ours pass through with their one sentence, others get the name."""
    cause = error.cause
    if isinstance(cause, UserError | RunError):
        return cause
    if isinstance(cause, _LOST_INPUT):
        return InputGone(what, f"an object it needs is lost: {first_line(cause)}")
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return RunError(f"{what} found no space left on a disk; make room and go on with --resume")
    return RunError(f"{what} failed: {type(cause).__name__}: {first_line(cause)}")


def first_line(error: BaseException) -> str:
    """What `error` says, in one line without colours.

    Ray puts the reason of a death last, after a list of ids, and of an object's loss last as well; of a worker that
    was killed for memory it says so in the middle.
    """
    lines = [line.strip() for line in _ANSI.sub("", str(error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = lines[-1] if isinstance(error, RayError) else lines[0]
    memory = [line for line in lines if "low on memory" in line]
    return textwrap.shorten(memory[0] if memory else line, _REASON_WIDTH, placeholder=" …")
