"""Signals that end a command as Ctrl-C does: SIGTERM (Slurm, Kubernetes, `ray job stop`), SIGHUP (closed terminals)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

END_SECONDS = 20.0
"""Seconds after a signal in which a command ends, even if a process that it started does not; Kubernetes allows 30."""
_STATUS = 130
words = ""
"""How to go on, for a command that has to end before its processes."""
_came: list[str] = []
"""The signal. Some calls of Ray's raise a KeyboardInterrupt without words instead of this one."""


def listen() -> None:
    """Raise KeyboardInterrupt at them from now on, with the signal's name. Does nothing outside the main thread.

    An ignored SIGHUP, as under ``nohup``, stays ignored.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, _interrupt)


def reason() -> str:
    """``interrupted by SIGTERM``; ``interrupted`` after Ctrl-C."""
    return " by ".join(["interrupted", *_came])


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:  # kernel and shell both send it; a second one must not cut the end off
        signal.signal(number, signal.SIG_IGN)
    _came[:] = [signal.Signals(number).name]
    late = threading.Timer(END_SECONDS, _leave)
    late.daemon = True
    late.start()
    raise KeyboardInterrupt(reason())


def _leave() -> None:
    """End at once. Ray ends the processes of a driver that is gone."""
    with suppress(OSError):
        print(f"\n{words or reason()} (it did not end within {END_SECONDS:g} s)", file=sys.stderr, flush=True)
    os._exit(_STATUS)
