"""Signals that end a command."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

COMMAND = """
import signal, sys, time
from solrl_ray.common import interrupts
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
interrupts.listen()
try:
    print("at work", flush=True)
    time.sleep(60.0)
except KeyboardInterrupt as error:
    print(error, flush=True)
    print(sys.stdin.readline())  # ends what it has started
    print("ended in order", flush=True)
"""


def command(on_hangup: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = subprocess.Popen([sys.executable, "-c", COMMAND, on_hangup], **pipes)  # type: ignore[call-overload]
    assert started.stdout.readline() == "at work\n"
    return started  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_by_name(number: signal.Signals) -> None:
    with command("SIG_DFL") as ended:
        assert ended.stdin
        assert ended.stdout
        ended.send_signal(number)
        assert ended.stdout.readline() == f"interrupted by {number.name}\n"
        if number == signal.SIGHUP:
            ended.send_signal(number)  # kernel and shell both send it
        ended.stdin.write("go on\n")
        ended.stdin.flush()
        assert ended.stdout.read().endswith("ended in order\n")


def test_an_ignored_hangup_interrupts_nothing() -> None:
    with command("SIG_IGN") as running:
        assert running.stdin
        assert running.stdout
        running.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.3)
        running.kill()
        assert running.stdout.read() == ""
