"""Makes SIGTERM (Slurm, Kubernetes, `ray job stop`) and SIGHUP (a closed terminal) end a command like Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

END_SECONDS = 20.0
"""Seconds after a signal within which a command ends, even if its child processes do not; Kubernetes allows 30."""
_STATUS = 130
words = ""
"""Printed if a command must end before its child processes: how to continue."""
_timers: list[threading.Timer] = []
_received: list[str] = []
"""Name of the received signal. Ray replaces our KeyboardInterrupt with an empty one in some calls."""


def listen() -> None:
    """Raise KeyboardInterrupt, with the signal's name, at these signals. Does nothing outside the main thread.

    An ignored SIGHUP, as under ``nohup``, stays ignored.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, _interrupt)


def reason() -> str:
    """``interrupted by SIGTERM``; ``interrupted`` after Ctrl-C."""
    return " by ".join(["interrupted", *_received])


def forget() -> None:
    """Cancel the deadline of a received signal: the run has ended, and the process goes on."""
    while _timers:
        _timers.pop().cancel()
    _received.clear()


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:  # kernel and shell both send it; the second must not interrupt the cleanup
        signal.signal(number, signal.SIG_IGN)
    _received[:] = [signal.Signals(number).name]
    late = threading.Timer(END_SECONDS, _leave)
    late.daemon = True
    _timers.append(late)
    late.start()
    raise KeyboardInterrupt(reason())


def _leave() -> None:
    """End at once. Ray then ends the processes that this driver started."""
    with suppress(OSError):
        print(f"\n{words or reason()} (it did not end within {END_SECONDS:g} s)", file=sys.stderr, flush=True)
    os._exit(_STATUS)
