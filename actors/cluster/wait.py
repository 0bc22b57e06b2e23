"""Waits for actors' answers, with a deadline, a name and a diagnosis (design law 8), and translates Ray's errors."""

from __future__ import annotations

import asyncio
import errno
import re
import textwrap
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from solrl_ray.errors import InputGone, Late, RunError, Unreachable, UserError, WorkerGone

_LOST_INPUT = (ObjectLostError, RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""Ray's errors for a call whose argument, passed by reference, was lost before the call ran."""

_NODE_IS_SILENT = "missing too many heartbeats"
"""Text in Ray's error for a node that did not answer for too long."""
_IDS = re.compile(r"(?:,? \(?\w+ [Ii][Dd]:? ?| )\b[0-9a-f]{32,}\b\)?")
"""Ids of actors and nodes, which do not help a user."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_REASON_WIDTH = 400


def get(ref: Any, *, what: str, seconds: float) -> Any:
    """Wait for the value of `ref`.

    Args:
        what: name of the wait, as the subject of a sentence in errors: ``evaluation of prompt 9f…``.
        seconds: deadline.

    Raises:
        WorkerGone: the deadline passed, or the worker died.
        InputGone: an argument of the call is lost.
        UserError: the worker found bad input.
        RunError: the worker failed with any other error.
    """
    try:
        return ray.get(ref, timeout=seconds)
    # First, because a RayTaskError is also an instance of the class of its cause.
    except RayTaskError as error:
        raise translated(error, what) from error
    except GetTimeoutError:
        raise Late(what, seconds) from None
    except RayError as error:
        raise _gone(error, what) from error


async def answer(ref: Any, *, what: str, seconds: float | None) -> Any:
    """`get` for asyncio. If the answer is itself a reference, its value is returned.

    `seconds` None: no deadline, because the caller has one.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            value = await ref
            return await value if isinstance(value, ray.ObjectRef) else value
    except RayTaskError as error:
        raise translated(error, what) from error
    except RayError as error:
        raise _gone(error, what) from error
    except TimeoutError:
        if not limit.expired():
            raise
        assert seconds is not None  # without a deadline there is no timeout
        raise Late(what, seconds) from None


def _gone(error: RayError, what: str) -> WorkerGone:
    if isinstance(error, ActorUnavailableError) or _NODE_IS_SILENT in str(error):
        return Unreachable(what, f"its worker cannot be reached: {first_line(error)}")
    return WorkerGone(what, f"its worker is gone: {first_line(error)}")


def translated(error: RayTaskError, what: str) -> Exception:
    """Translate a remote failure. UserError and RunError pass through; any other error becomes a RunError that names
    the wait.
    """
    cause = error.cause
    if isinstance(cause, UserError | RunError):
        return cause
    if isinstance(cause, _LOST_INPUT):
        return InputGone(what, f"an object it needs is lost: {first_line(cause)}")
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        where = f"the disk of {cause.filename}" if cause.filename else "a disk"
        return RunError(f"{what} found no space left on {where}; free some space and continue with --resume")
    return RunError(f"{what} failed: {type(cause).__name__}: {first_line(cause)}")


def first_line(error: BaseException) -> str:
    """The reason in `error` as one line, without colours and ids: its first line, or all lines if the first ends with a
    colon.

    Ray's errors have the reason for a death or a lost object in the last line, after a list of ids. If a worker was
    killed for using too much memory, the reason is in the middle.
    """
    lines = [line.strip() for line in _IDS.sub("", _ANSI.sub("", str(error))).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    first = " ".join(lines) if lines[0].endswith(":") else lines[0]
    line = lines[-1] if isinstance(error, RayError) else first
    memory = [line for line in lines if "low on memory" in line]
    return textwrap.shorten(memory[0] if memory else line, _REASON_WIDTH, placeholder=" …")
