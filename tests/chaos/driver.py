"""The driver of a soak's run: a process that is killed, and started again whenever it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from actors.client import launch
from solrl_ray.common.files import replace_file
from solrl_ray.errors import RunError, UserError
from tests.chaos.noting import CLASSES
from tests.chaos.verdict import End
from tests.support import forkserver
from tests.support.fork_client import KILLED
from tests.support.patience import slowness, wait_until
from tests.support.small import folder, small_config

PID = "driver.pid"
FOREVER = 1_000_000
"""Iterations of a run that is stopped by other means."""
SIZES = (
    "fleet={explorers: {count: 3, num_cpus: 1}, regenerators: {count: 1, num_cpus: 1}}",
    "fleet.learners={num_cpus: 1, threads: 1}",
    f"fleet.max_replacements={FOREVER}",
    "learner.world_size=2",
    "fleet.deadlines={resources: 120, explore: 20, regenerate: 40, update: 60, collective: 60, publish: 40}",
    "fleet.deadlines.selector=40",
    "evaluation={prompts: 2, samples: 2, steps: 3, pictures: 0, reference: ''}",
)
PEACE = 600.0
"""Longest that the run may take from the last kill to its end, seconds."""


@dataclass
class Driver:
    """The process that a user would have started, started again whenever it has ended."""

    root: Path
    address: str
    forks: str
    """The command by which it is a fork."""
    ends: list[End] = field(default_factory=list)
    """Of those that ended by themselves."""
    process: subprocess.Popen[bytes] | None = None
    began: int = 0
    since: float = 0.0
    """When it was started last."""

    @property
    def log(self) -> Path:
        return self.root / f"driver-{self.began}.log"

    def start(self, *, iterations: int = FOREVER, name: str = "run") -> None:
        """Begin the run, or go on with it."""
        self.began, self.since = self.began + 1, time.monotonic()
        (self.root / PID).unlink(missing_ok=True)
        command = forkserver.calling(self.forks, drive, str(self.root), name, self.address, str(iterations))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def ended(self) -> int | None:
        """Its exit status, once it has ended; notes why if it was not killed."""
        assert self.process is not None
        status = self.process.poll()
        if status is not None and status > 0 and status != KILLED:
            said = [line for line in self.log.read_text().splitlines() if line.startswith("error: ")]
            sentence = said[-1].removeprefix("error: ") if said else f"status {status}, see {self.log}"
            self.ends.append(End(sentence, self.since))
        return status

    def kill(self) -> None:
        process = self.process
        assert process is not None
        wait_until("the driver", lambda: (self.root / PID).exists() or process.poll() is not None)
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            os.kill(int((self.root / PID).read_text()), signal.SIGKILL)
        process.wait()


def drive(root: str, name: str, address: str, iterations: str) -> None:
    """What the driver's process does: as ``solrl train``, with players that note what they do."""
    replace_file(Path(root) / PID, str(os.getpid()).encode())
    config = small_config(Path(root), name, *SIZES, f"run.iterations={iterations}")
    resume = (folder(config) / "config.yaml").exists()
    try:
        sys.exit(launch.train(config, resume=resume, address=address, live=False, classes=CLASSES))
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def peace(driver: Driver, iterations: int, name: str, seconds: float = PEACE) -> float:
    """Run to the end without any disturbance; returns the seconds from its start."""
    began = time.monotonic()
    driver.start(iterations=iterations, name=name)
    while (status := driver.ended()) is None:
        assert time.monotonic() - began < seconds * slowness(), f"{name} did not end in {seconds:g} s; {driver.log}"
        time.sleep(0.1)
    assert status == 0, f"{name} ended with {status}: {driver.log.read_text()}"
    return time.monotonic() - began
