"""Signals that end a command as Ctrl-C does: SIGTERM (Slurm, Kubernetes, `ray job stop`), SIGHUP (closed terminals)."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_came: list[str] = []
"""The signal. Some calls of Ray's raise a KeyboardInterrupt without words instead of this one."""


def listen() -> None:
    """From now on, raise KeyboardInterrupt at them, with the signal's name. Does nothing outside the main thread.

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
    raise KeyboardInterrupt(reason())
