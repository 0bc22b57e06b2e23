"""What commands print in any locale, and where nobody reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import made_runs

COMMAND = "import sys; from solrl_ray.cli import main; sys.exit(main(sys.argv[1:]))"
RUN = """
from solrl_ray.common.output import lost_if_refused, settle
from solrl_ray.metrics.records import Progress
from solrl_ray.report.live import LiveView
settle()
with LiveView(plain=True) as view:
    for state in ("exploring", "done"):
        view.update(Progress(run="r", state=state, iteration=0, iterations=1))
with lost_if_refused():
    print("summary")
"""
"""What `solrl train` does with the output."""


@pytest.mark.parametrize("command", [["status", "RUN"], ["plan", "demo"], ["list"], ["config", "demo"]])
def test_a_command_prints_in_any_encoding(command: list[str], tmp_path: Path) -> None:
    run = made_runs.write_run(tmp_path / "run")
    words = [str(run) if word == "RUN" else word for word in command]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("ascii")


@pytest.mark.parametrize("unread", ["pipe", "full", "closed"])
def test_a_run_goes_on_and_ends_well_where_its_output_cannot_be_written(unread: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full, os.fdopen(writing, "wb") as pipe:
        out = {"pipe": pipe, "full": full, "closed": None}[unread]
        start = [sys.executable, "-c", RUN]
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *start] if unread == "closed" else start
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_behind_the_output_of_a_command_is_one_sentence() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", COMMAND, "list"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")
