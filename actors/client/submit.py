"""``solrl submit``: a run as a Ray job with the present folder (not too large a one); its log, its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import ClientError
from ray._private import ray_constants
from ray._private.runtime_env import packaging
from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from actors.cluster import wait
from solrl_ray.errors import RunError, UserError

STREAM_RETRY_SECONDS = 1.0
SILENCE_SECONDS = 120.0
"""Seconds after which this command gives up on a silent Job server; the job goes on."""
SHELLS_OFFSET = 128
"""A shell's exit status for a command that a signal killed is this plus the signal's number."""
NO_AGENT = "No available agent to submit job"
"""Ray's error while no node of a cluster that has just started can start a job. The job is not submitted then."""
AGENT_SECONDS = 60.0
"""Seconds to retry after that error."""
PENDING_SECONDS = 1800.0
"""Seconds that a job may wait for resources before this command says what is missing. The job stays submitted."""


def submit(
    run: str,
    arguments: Sequence[str],
    *,
    address: str,
    folder: Path,
    without: Sequence[str],
    needed: Sequence[str],
    follow: bool,
    again: str,
) -> int:
    """Submit ``python -m solrl_ray train ARGUMENTS`` with `folder` as its working directory.

    Args:
        run: the run's name; its attempts are the jobs ``<run>-1``, ``<run>-2``, ….
        address: of the dashboard, such as ``http://head:8265``.
        without: names in `folder` that are not uploaded, whatever ``.gitignore`` and ``.rayignore`` say.
        needed: files in `folder` that the job reads.
        follow: stream the log and wait for the end.
        again: the command that continues the run if the job is stopped or killed.

    Returns 0 if the job succeeded, or was submitted and is not followed; 1 if it failed or was stopped. Raises
    RunError: no Job server answers there, or it refuses this user's token or this job; UserError as `check_upload`.
    """
    excludes = [f"/{name}/" for name in without]
    check_upload(folder, excludes, needed)
    logging.getLogger("ray").setLevel(logging.ERROR)  # else a line for each file that is left out
    client = _client(address)
    try:
        taken = {details.submission_id for details in client.list_jobs()}  # Ray refuses an id that was used before
        job = next(name for attempt in count(1) if (name := f"{run}-{attempt}") not in taken)
        _begin(
            client,
            entrypoint=shlex.join(["python", "-m", "solrl_ray", "train", *arguments, "--no-live"]),
            submission_id=job,
            runtime_env={"working_dir": str(folder), "excludes": excludes},
            metadata={"job_name": run},
        )
    except (RuntimeError, ValueError, OSError, RayError) as error:
        raise RunError(f"the job could not be submitted to {address}: {wait.first_line(error)}") from error
    print(f"job         {job}\nstop it     ray job stop --address {address} {job}", flush=True)
    return _follow(client, job, again) if follow else 0


def check_upload(folder: Path, excludes: list[str], needed: Sequence[str]) -> None:
    """Raise UserError if Ray would leave out a needed file, or the folder is larger than a Job server takes."""
    sizes: dict[Path, int] = {}

    def take(path: Path) -> None:
        if path.is_file():
            sizes[path] = path.stat().st_size

    ignoring = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    packaging._dir_travel(folder, [packaging._get_excludes(folder, excludes)], take, ignoring, logging.getLogger("ray"))
    for name in needed:
        if (place := Path(os.path.normpath(folder / name))).is_file() and place not in sizes:
            raise UserError(
                f"{place} would not reach the job, because .gitignore or .rayignore name it; take it out of them, or "
                f"set {ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE}=1 if it is .gitignore."
            )
    limit = ray_constants.DASHBOARD_CLIENT_MAX_SIZE
    if (total := sum(sizes.values())) > limit:
        parts: Counter[str] = Counter()
        for path, size in sizes.items():
            parts[path.relative_to(folder).parts[0]] += size
        largest = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in parts.most_common(3))
        raise UserError(
            f"{folder} has {total / 1e6:.0f} MB, and a Job server takes {limit / 1e6:.0f} MB; name in .rayignore what "
            f"the run does not need. The largest are {largest}."
        )


def _begin(client: JobSubmissionClient, **job: Any) -> None:
    """Submit it as soon as the cluster can start jobs. Raises as `JobSubmissionClient.submit_job`."""
    asked = time.monotonic()
    while True:
        try:
            client.submit_job(**job)
            return
        except RuntimeError as error:
            if NO_AGENT not in str(error) or time.monotonic() - asked > AGENT_SECONDS:
                raise
        time.sleep(STREAM_RETRY_SECONDS)


def _client(address: str) -> JobSubmissionClient:
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise RunError(f"the Job server at {address} cannot be used: {wait.first_line(error)}") from error


def _follow(client: JobSubmissionClient, job: str, again: str) -> int:
    """Print the log until the job has ended. The stream ends when a connection does, so the status decides.

    Raises RunError: the job is not begun in `PENDING_SECONDS`, or the server is silent for `SILENCE_SECONDS`.
    """
    printed = 0
    submitted = answered = time.monotonic()
    status = JobStatus.PENDING
    while not status.is_terminal():
        if status is not JobStatus.PENDING:
            printed = _print_log(client, job, printed)
        try:
            status = client.get_job_status(job)
            answered = time.monotonic()
        except (RuntimeError, OSError, RayError) as error:
            if time.monotonic() - answered > SILENCE_SECONDS:
                raise RunError(
                    f"the Job server did not answer for {SILENCE_SECONDS:g} s while job {job} was followed "
                    f"({wait.first_line(error)}); the job may go on: ray job status {job}"
                ) from error
        if status is JobStatus.PENDING and time.monotonic() - submitted > PENDING_SECONDS:
            raise RunError(
                f"job {job} has been PENDING for {PENDING_SECONDS:g} s: the cluster has no place for it; "
                f"it stays submitted: ray job stop {job} takes it back"
            )
        time.sleep(STREAM_RETRY_SECONDS)
    _print_log(client, job, printed)  # of a job that ended between two questions
    print(f"job {job} {status.value.lower()}{_cut_off(client, job, status, again)}", flush=True)
    return 0 if status is JobStatus.SUCCEEDED else 1


def _cut_off(client: JobSubmissionClient, job: str, status: JobStatus, again: str) -> str:
    """What follows of a job that did not end by itself; empty for others, whose log says why."""
    if status is JobStatus.STOPPED:
        return f"; go on with: {again}"
    if status is JobStatus.FAILED:
        try:
            details = client.get_job_info(job)
        except (RuntimeError, OSError, RayError):  # the head may go down with the job
            return f"; go on with: {again}"
        code = details.driver_exit_code
        if code is None:  # its supervisor or its node is gone
            return f" ({wait.first_line(RuntimeError(details.message))}); go on with: {again}"
        if code < 0 or code > SHELLS_OFFSET:
            return (
                f": its command was killed by signal {-code if code < 0 else code - SHELLS_OFFSET}; go on with: {again}"
            )
    return ""


def _print_log(client: JobSubmissionClient, job: str, printed: int) -> int:
    """Print the job's log beyond its first `printed` characters; returns how many are printed now.

    Each connection sends the log from its beginning. A connection may break; the job's status says whether it goes on.
    """

    async def follow() -> None:
        nonlocal printed
        seen = 0
        async for lines in client.tail_job_logs(job):
            print(lines[max(0, printed - seen) :], end="", flush=True)
            seen += len(lines)
            printed = max(printed, seen)

    with contextlib.suppress(RuntimeError, OSError, RayError, ClientError):
        asyncio.run(follow())
    return printed
