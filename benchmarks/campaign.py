"""Many runs of a benchmark side by side, each a `solrl train` of its own on a Ray of its own.

What still trains when the time is over is stopped. A run that is there is gone on with, so several short sessions add
up.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.storage.run_folder import RunFolder

REPOSITORY = Path(__file__).parents[1]
ON_ONE_GPU = (
    "fleet={explorers: {count: 1, num_gpus: 0.3}, regenerators: {count: 1, num_gpus: 0.3}, learners: {num_gpus: 0.3}}",
    "compile={enabled: false, learner: false}",
)
"""Settings with which one GPU is for all. Compiling would cost a run of seconds more than it gives."""
STOP_SECONDS = 30.0
"""For a run that is told to stop, before it is killed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run by its configuration files and ``--set`` texts, which name its folder."""

    files: tuple[Path, ...]
    overrides: tuple[str, ...]

    @property
    def config(self) -> Config:
        """Raises UserError if it is not valid."""
        config = load(self.files, self.overrides)
        check(config)
        return config

    @property
    def done(self) -> bool:
        config = self.config
        folder = RunFolder.of(config)
        made = max((updates for updates, _ in folder.checkpoints()), default=0)
        return (folder.path / "summary.json").exists() and made >= config.run.iterations


def train_all(jobs: Sequence[Job], *, at_once: int, seconds: float) -> None:
    """Train those that are not done, `at_once` at a time; after `seconds` stop what still trains.

    Each writes a log beside its run, and how a run ended that failed is printed. What is stopped may be gone on with.
    """
    deadline = time.monotonic() + seconds
    waiting = [job for job in jobs if not job.done]
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < at_once:
                running.append(_start(waiting.pop(0)))
            for log, process in [each for each in running if each[1].poll() is not None]:
                running.remove((log, process))
                if process.returncode:
                    print(f"a run ended with status {process.returncode}; see {log}", flush=True)
            time.sleep(0.5)
    finally:
        for _, process in running:
            process.terminate()
        for log, process in running:
            try:
                process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            print(f"{log.stem} was stopped; the same command goes on with it", flush=True)
        if waiting:
            print(f"{len(waiting)} runs have not begun; the same command begins them", flush=True)


def _start(job: Job) -> tuple[Path, subprocess.Popen[bytes]]:
    """``solrl train``, which goes on with what is there and refuses to under other settings."""
    passed = [*map(str, job.files), *(part for text in job.overrides for part in ("--set", text))]
    path = RunFolder.of(job.config).path
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.with_name(f"{path.name}.log")
    command = [sys.executable, "-m", "solrl_ray", "train", *passed, "--continue", "--no-live"]
    with log.open("ab") as file:
        return log, subprocess.Popen(command, stdout=file, stderr=file, cwd=REPOSITORY)
