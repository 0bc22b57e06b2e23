"""A Ray head of its own, as `ray start` makes it: `ray stop` would end every Ray of this machine."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray.util import get_node_ip_address

from solrl_ray.learning.engine import free_port
from tests.chaos.notes import alive

BIN = Path(sys.executable).parent
PATIENCE = 400.0


@dataclass(frozen=True, slots=True)
class Head:
    address: str
    """Of the GCS."""
    url: str
    """Of the Job server."""
    token: str

    @property
    def environment(self) -> dict[str, str]:
        """What a user of this cluster has in the environment."""
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "PATH": path}

    def status_of(self, path: str, token: str | None, method: str = "GET") -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            request = urllib.request.Request(self.url + path, headers=headers, method=method)
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def jobs(self) -> list[dict[str, Any]]:
        """What the dashboard lists as jobs."""
        request = urllib.request.Request(f"{self.url}/api/jobs/", headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found


def wait_until(what: str, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.05)


def end(head: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a head and all that it started: told to end, a raylet waits half a minute for agents and workers."""
    below = [process.pid for process in psutil.Process(head.pid).children(recursive=True)]  # jobs are other sessions

    def nobody_lives() -> bool:
        session = [pid for pid in psutil.pids() if session_of(pid) == head.pid]
        living = [pid for pid in {*below, *session} if alive(pid)]
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not living

    wait_until("the end of all that the head started", nobody_lives)
    head.communicate(timeout=PATIENCE)


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


@contextmanager
def head(
    cpus: int = 2,
    scaling: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    labels: str = "",
) -> Iterator[Head]:
    """A cluster of one node, with token authentication; in the end all of it is gone at once.

    Args:
        scaling: what its autoscaler is to do, as in Ray's cluster files.
        variables: of its environment.
        labels: of its node, such as ``role=head``.
    """
    port, dashboard, client, agent = (free_port() for _ in range(4))
    made = Head(f"{get_node_ip_address()}:{port}", url=f"http://127.0.0.1:{dashboard}", token=secrets.token_hex(16))
    Path("/tmp/ray").mkdir(exist_ok=True)
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it holds Unix sockets
    command = [str(BIN / "ray"), "start", "--head", "--block", f"--num-cpus={cpus}", "--object-store-memory=200000000"]
    if labels:
        command.append(f"--labels={labels}")
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    if scaling is not None:
        provider = scaling["provider"] | {"gcs_address": made.address}
        file = Path(place, "cluster.json")
        file.write_text(json.dumps({**scaling, "provider": provider}))
        command.append(f"--autoscaling-config={file}")
    process = subprocess.Popen(
        [*command, *ports, f"--dashboard-agent-listen-port={agent}", "--disable-usage-stats", f"--temp-dir={place}"],
        env={**made.environment, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_until("the Job server", lambda: made.status_of("/api/jobs/", made.token) == 200)
        yield made
    finally:
        end(process)
        shutil.rmtree(place, ignore_errors=True)
