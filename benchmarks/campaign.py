"""Trains many runs of a benchmark in parallel, each in one process (`one_process.py`).

Runs that still train when the time is over are stopped. Existing runs are resumed, so several short sessions add up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.storage.run_folder import RunFolder

REPOSITORY = Path(__file__).parents[1]
ON_ONE_GPU = (
    "fleet={placement: colocated, explorers: {count: 1, num_gpus: 1}, regenerators: {count: 1, num_gpus: 1}}",
    "fleet={learners: {num_gpus: 1}}",
    "compile={enabled: false, learner: false}",
)
"""Settings for all roles on one GPU. Nothing is compiled, which would take longer than it saves in such short runs."""
LOOK_SECONDS = 5.0
"""Seconds between checks whether runs may be ended (`enough`)."""
STOP_SECONDS = 30.0
"""Seconds that a terminated run gets before it is killed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run, given by its configuration files and ``--set`` texts, which determine its folder."""

    files: tuple[Path, ...]
    overrides: tuple[str, ...]

    @property
    def config(self) -> Config:
        """The merged configuration. Raises UserError if it is invalid."""
        config = load(self.files, self.overrides)
        check(config)
        return config

    @property
    def done(self) -> bool:
        config = self.config
        folder = RunFolder.of(config)
        made = max((updates for updates, _ in folder.checkpoints()), default=0)
        return (folder.path / "summary.json").exists() and made >= config.run.iterations


@dataclass(frozen=True, slots=True)
class _Running:
    job: Job
    place: int
    """Index of its environment variables in `places`."""
    log: Path
    process: subprocess.Popen[bytes]


def train_all(
    jobs: Sequence[Job],
    *,
    at_once: int,
    seconds: float,
    places: Sequence[Mapping[str, str]] = ({},),
    enough: Callable[[Job], bool] = lambda job: False,
) -> None:
    """Train the unfinished jobs, `at_once` at a time; after `seconds` stop those that still train.

    Each run logs to a file next to its folder; the status of a failed run is printed. Stopped runs can be resumed.

    Args:
        places: environment variables, one mapping per GPU; a run gets the mapping with the fewest runs.
        enough: returns True if a running job may be ended.
    """
    deadline, next_check = time.monotonic() + seconds, 0.0
    waiting = list(jobs)
    running: list[_Running] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                if not job.done:
                    taken = Counter(each.place for each in running)
                    place = min(range(len(places)), key=lambda place: taken[place])
                    running.append(_start(job, place, places[place]))
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                if each.process.returncode:
                    print(f"a run ended with status {each.process.returncode}; see {each.log}", flush=True)
            if time.monotonic() >= next_check:
                ready = [each for each in running if enough(each.job)]
                running = [each for each in running if each not in ready]
                _stop(ready, "was ended: its result is decided")
                next_check = time.monotonic() + LOOK_SECONDS
            time.sleep(0.5)
    finally:
        _stop(running, "was stopped; run the same command again to resume it")
        if waiting:
            print(f"{len(waiting)} runs have not begun; run the same command again to begin them", flush=True)


def _stop(running: Sequence[_Running], why: str) -> None:
    for each in running:
        each.process.terminate()
    for each in running:
        try:
            each.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            each.process.kill()
        print(f"{each.log.stem} {why}", flush=True)


def _training(job: Job) -> list[str]:
    """The command that starts or resumes a run; it fails if the existing run has other settings."""
    settings = (part for text in job.overrides for part in ("--set", text))
    return [sys.executable, str(REPOSITORY / "benchmarks" / "one_process.py"), *map(str, job.files), *settings]


def _start(job: Job, place: int, variables: Mapping[str, str]) -> _Running:
    path = RunFolder.of(job.config).path
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.with_name(f"{path.name}.log")
    with log.open("ab") as file:
        environment = os.environ | dict(variables)
        process = subprocess.Popen(_training(job), stdout=file, stderr=file, cwd=REPOSITORY, env=environment)
    return _Running(job, place, log, process)
