"""Connects this process as a driver to a Ray cluster, or to a local Ray that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig

from actors.cluster import wait
from solrl_ray.common import interrupts, ray_auth, system_package
from solrl_ray.errors import RunError, UserError

ACCESS_CHECK_SECONDS = 10.0
BUSY = "timed out during startup"
"""Text in Ray's error if the node did not start within 30 s, a limit that no setting changes."""
UNLISTED = "_ray_internal_solrl"
"""Namespace of unlisted drivers: the dashboard and ``ray list jobs`` omit those with the prefix ``_ray_internal_``."""


class _Job(JobConfig):
    """Gives workers only those folders that are on this process's `sys.path`.

    By default Ray also puts the working folder first, where a user's ``statistics.py`` would replace Python's. If a
    package there is called `actors`, this installation's folder comes before it.
    """

    def _serialize(self) -> Any:
        self._py_driver_sys_path[:] = [folder for folder in self._py_driver_sys_path if folder in sys.path]
        if system_package.is_shadowed():
            self._py_driver_sys_path.append(str(system_package.FOLDER))  # workers search the last one first
        return super()._serialize()


@contextmanager
def joined(address: str | None, *, job: str = "", tell: bool = False) -> Iterator[bool]:
    """Context that connects to Ray with `join`, unless this process is already a driver. Yields True if it connected.

    Args:
        address: address of the cluster; default: RAY_ADDRESS, as in a submitted job. Without either, starts a local
            Ray.
        job: name of this process in the cluster's list of jobs; empty: it is not listed.
        tell: if True, print the address of the dashboard.

    Raises UserError, RunError as `join`.
    """
    if ray.is_initialized():
        if system_package.is_shadowed():
            raise UserError(
                "Ray was started by this process before, and its workers would import another package called "
                f"{system_package.NAME} from a folder on Python's path; call ray.shutdown() first, or rename it."
            )
        yield False
        return
    context = join(address or os.environ.get("RAY_ADDRESS"), job=job)
    try:
        if tell and context.dashboard_url:
            token = (
                f" (token: {os.environ.get('RAY_AUTH_TOKEN_PATH', '`ray get-auth-token`')})"
                if os.environ.get(ray_auth.MODE) == "token"
                else ""
            )
            print(f"dashboard   http://{context.dashboard_url}{token}", flush=True)
        yield True
    finally:
        ray.shutdown()


def join(address: str | None, *, job: str = "") -> Any:
    """Connect this process to the cluster at `address`, or start a local Ray; returns Ray's context.

    `job` as in `joined`.

    Raises UserError if `address` is that of a dashboard; RunError if no Ray answers at `address`, or if it refuses this
    user's token.
    """
    try:
        if address:
            ray_auth.check_access(address, seconds=ACCESS_CHECK_SECONDS)
        else:
            # Workers read this when they load OpenMP. By default, waiting threads spin. Those of the learner would take
            # up to five times their computing time away from samplers on the same cores.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        context = init(
            address=address or "local",
            namespace=None if job else UNLISTED,
            job_config=_Job(metadata={"job_name": job} if job else {}),
            log_to_driver=False,
            logging_level="error",
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        where = f"the Ray cluster at {address} could not be joined" if address else "a local Ray did not start"
        raise RunError(f"{where}: {wait.first_line(error)}") from error
    except SystemExit as terminated:  # raised by Ray's SIGTERM handler during `ray.init`
        raise KeyboardInterrupt from terminated
    interrupts.listen()  # again, because `ray.init` installed a handler that would abort with a stack trace
    return context


def init(**options: Any) -> Any:
    """`ray.init`, tried twice if the machine is too busy. Raises as `ray.init`; RunError if both attempts time out."""
    try:
        return ray.init(**options)
    except Exception as error:  # Ray has no class for this error
        if BUSY not in str(error):
            raise
    print("note: Ray did not start within 30 s because this machine is busy; trying once more", flush=True)
    ray.shutdown()
    try:
        return ray.init(**options)
    except Exception as error:
        if BUSY not in str(error):
            raise
        raise RunError(
            "Ray did not start within 30 s, twice: this machine is too busy, or one of Ray's processes, such as its "
            "dashboard, cannot start; stop other programs on this machine, or read dashboard*.log, raylet.err and "
            f"gcs_server.err in {os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs"
        ) from error
