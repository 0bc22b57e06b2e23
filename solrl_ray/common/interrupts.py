"""Signals that end a command as Ctrl-C does: SIGTERM (Slurm, Kubernetes, `ray job stop`), SIGHUP (closed terminals)."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def listen() -> None:
    """From now on, raise KeyboardInterrupt at them, with the signal's name. Does nothing outside the main thread.

    An ignored SIGHUP, as under ``nohup``, stays ignored.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:  # kernel and shell both send it; a second one must not cut the end off
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(f"interrupted by {signal.Signals(number).name}")
