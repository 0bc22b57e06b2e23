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
interrupts.END_SECONDS = float(sys.argv[2])
interrupts.listen()
try:
    print("at work", flush=True)
    time.sleep(60.0)
except KeyboardInterrupt as error:
    print(error, flush=True)
    print(sys.stdin.readline())  # ends what it has started
    print("ended in order", flush=True)
"""


def command(on_hangup: str, end_seconds: float = 60.0) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = subprocess.Popen([sys.executable, "-c", COMMAND, on_hangup, str(end_seconds)], **pipes)  # type: ignore[call-overload]
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_whose_end_hangs_ends_nevertheless(number: signal.Signals) -> None:
    with command("SIG_DFL", end_seconds=0.5) as ended:
        assert ended.stdout
        ended.send_signal(number)
        said = ended.stdout.read()  # while it waits for a line that never comes
    assert ended.returncode == 130
    assert said.splitlines()[-1].startswith(f"interrupted by {number.name} ")


FORGETTING = """
import os, signal, time
from solrl_ray.common import interrupts
interrupts.END_SECONDS = 0.3
interrupts.listen()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60.0)
except KeyboardInterrupt:
    interrupts.forget()
time.sleep(1.0)
print(interrupts.reason())
"""


def test_a_process_that_goes_on_after_its_run_is_not_ended_later() -> None:
    done = subprocess.run([sys.executable, "-c", FORGETTING], capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted\n"


def test_an_ignored_hangup_interrupts_nothing() -> None:
    with command("SIG_IGN") as running:
        assert running.stdin
        assert running.stdout
        running.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.3)
        running.kill()
        assert running.stdout.read() == ""
