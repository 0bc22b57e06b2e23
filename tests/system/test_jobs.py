"""A run submitted to a real cluster's Job server, from a clean checkout, with token authentication."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.learning.engine import free_port
from tests.chaos.notes import alive
from tests.small import digests, folder, small_config

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PATIENCE = 400.0


@dataclass(frozen=True, slots=True)
class Head:
    url: str
    token: str

    @property
    def environment(self) -> dict[str, str]:
        """What a user of this cluster has in the environment."""
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "PATH": path}

    def status_of(self, path: str, token: str | None) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


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


@pytest.fixture
def head() -> Iterator[Head]:
    """A head node of its own: `ray stop` would end every Ray of this machine."""
    port, dashboard, client, agent = (free_port() for _ in range(4))
    made = Head(url=f"http://127.0.0.1:{dashboard}", token=secrets.token_hex(16))
    Path("/tmp/ray").mkdir(exist_ok=True)
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it holds Unix sockets
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=200000000"]
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    process = subprocess.Popen(
        [*command, *ports, f"--dashboard-agent-listen-port={agent}", "--disable-usage-stats", f"--temp-dir={place}"],
        env=made.environment,
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the repository tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("a clean checkout needs git and the repository")
    for name in listed.stdout.split("\0")[:-1]:
        if (REPOSITORY / name).is_file():
            target = tmp_path / "checkout" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, target)
    return tmp_path / "checkout"


@pytest.mark.timeout(1800)  # two jobs, each with the start of a run
@pytest.mark.faults
def test_a_submitted_run_is_stopped_and_resubmitted_to_the_same_bytes(
    calm: Config, head: Head, checkout: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "runs", "submitted")
    run = folder(config)
    (checkout / "small.yaml").write_text(to_yaml(config))
    said = []

    def call(*command: str | Path, status: int = 0, **variables: str) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=checkout,
            env=head.environment | {"PYTHONPATH": ""} | variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        said.append(done.stdout + done.stderr)
        assert done.returncode == status, said[-1]
        return said[-1]

    solrl, jobs = (BIN / "python", "-m", "solrl_ray"), (BIN / "ray", "job")
    submit = (*solrl, "submit", "small.yaml", "--address", head.url, "--no-wait")
    assert head.status_of("/api/jobs/", None) == 401
    refused = call(*submit, status=1, RAY_AUTH_TOKEN="another")
    assert refused.startswith(f"error: the Job server at {head.url} cannot be used: "), refused
    assert "Traceback" not in refused

    assert "submitted-1" in call(*submit)
    wait_until("iteration 1", (run / "journal" / "iteration-000001.jsonl").exists)
    call(*jobs, "stop", "--address", head.url, "submitted-1")
    assert not (run / "summary.json").exists()
    assert "iteration 1/3" in call(*jobs, "logs", "--address", head.url, "submitted-1")

    train = ("python", "-m", "solrl_ray", "train", "--resume", run, "--no-live")
    log = call(*jobs, "submit", "--address", head.url, "--working-dir", ".", "--", *train)
    assert "iteration 3/3" in log
    assert digests(config) == digests(calm)

    assert not any(head.token in text for text in said)
    held = [path for path in run.rglob("*") if path.is_file() and head.token.encode() in path.read_bytes()]
    assert held == []
