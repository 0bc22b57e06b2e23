"""Makes this process a driver of a Ray cluster, or of a local Ray started for it."""

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
"""In Ray's error if its node was not there after 30 s, which no setting changes."""
UNLISTED = "_ray_internal_solrl"
"""The dashboard and ``ray list jobs`` omit drivers in such a namespace, as they omit Ray's own."""


class _Job(JobConfig):
    """Workers get the folders that are on this process's own path. Ray would also put the present folder first, where a
    user's ``statistics.py`` would take the place of Python's. If another package there is called `actors`, this
    installation's folder comes before it.
    """

    def _serialize(self) -> Any:
        self._py_driver_sys_path[:] = [folder for folder in self._py_driver_sys_path if folder in sys.path]
        if system_package.is_shadowed():
            self._py_driver_sys_path.append(str(system_package.FOLDER))  # workers search the last one first
        return super()._serialize()


@contextmanager
def joined(address: str | None, *, job: str = "", tell: bool = False) -> Iterator[bool]:
    """Call `join`, unless this process is a driver already; yields whether it became one.

    Args:
        address: default: RAY_ADDRESS, as in a submitted job; without either, a local Ray is started.
        job: the name of this process in the cluster's list of jobs; empty: it is not listed.
        tell: print where the dashboard is.

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

    Raises UserError if `address` is a dashboard's; RunError if no Ray answers there, or it refuses this user's token.
    """
    try:
        if address:
            ray_auth.check_access(address, seconds=ACCESS_CHECK_SECONDS)
        else:
            # Workers read this when they load OpenMP. By default, waiting threads spin: the learner's would take up to
            # five times their own computing time from samplers on the same cores.
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
    except SystemExit as told:  # Ray's handler of SIGTERM raises it during `ray.init`
        raise KeyboardInterrupt from told
    interrupts.listen()  # again: Ray's handler, installed just now, would abort with a stack trace
    return context


def init(**options: Any) -> Any:
    """`ray.init`, a second time if the machine was too busy for the first. Raises as it, RunError if both times."""
    try:
        return ray.init(**options)
    except Exception as error:  # it has no type of its own
        if BUSY not in str(error):
            raise
    print("note: Ray did not start within 30 s: this machine is busy; it is tried once more", flush=True)
    ray.shutdown()
    try:
        return ray.init(**options)
    except Exception as error:
        if BUSY not in str(error):
            raise
        raise RunError(
            "Ray did not start within 30 s, twice: this machine is too busy, or one of Ray's processes, such as its "
            "dashboard, cannot start here; end what else runs here, or read dashboard*.log, raylet.err and "
            f"gcs_server.err in {os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs"
        ) from error
