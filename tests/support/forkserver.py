"""Ray's workers, and drivers, as forks of one process that has imported what they import: seconds less for each one.

Most tests of the system start a handful of workers, and two cores would be busy with nothing but importing the same
libraries again, Ray among them. ::

    raylet ─► worker.py ─► server ─► server of a job, which has imported Ray ─► fork: the worker

A Ray whose nodes are started with `set_up_by` as `SETUP_WORKER` starts each worker by a small program that hands its
arguments, environment, working folder and streams to the server, and waits (`tests.support.fork_client`). The fork goes
on as the worker that would have been. It is a process of its own: it can be killed like any other. Ray reads variables
when it is imported, the number of its job among them, so there is a server for each set of their values.

Drivers in processes of their own are told by `environment`: how the Ray that they start makes workers, and, of one that
a command has started, what its workers are run by (``py_executable`` of a runtime environment). They are forks
themselves if they are started by `solrl`, or by `calling`.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.fork_client import STREAMS, send

CLIENT = Path(__file__).with_name("fork_client.py")
ROOT = Path(__file__).parents[2]
SOCKET, WORKER = "forks", "worker.py"
_SERVERS: list[subprocess.Popen[bytes]] = []
"""That this process has started; another one may end them."""
PRELOADED = (
    "solrl_ray.models.flux",
    "solrl_ray.rewards.clip",
    "solrl_ray.learning.learner",
    "solrl_ray.report.page",
    "solrl_ray.report.trackers",
    "peft",
    "deepspeed",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "tensorboard.summary.writer.record_writer",
    "tensorboard.compat.proto.event_pb2",
    "jsonschema",
    "wcwidth",
)
"""What the workers of a run on the testbed import, and what Ray does."""
WITH_RAY = ("ray._private.node", "actors.client.launch", "actors.fleet.actor_factory")
"""What imports Ray, and they import as well."""
SETUP_WORKER = "ray._private.ray_constants.SETUP_WORKER_FILENAME"
"""Where Ray has the name of the program that starts the workers of nodes to come; it may be a path."""
SET_UP_BY = "TESTS_SETUP_WORKER"
"""Variable of a driver: the value of `SETUP_WORKER`."""
START_WORKER = """import sys
sys.path.insert(0, {folder!r})
from fork_client import set_up
set_up({path!r})
"""


@contextmanager
def shared(folder: Path) -> Iterator[str]:
    """A server for all processes that say `folder`: the first one starts it, the last one ends it; yields the command
    for ``py_executable``.

    It still imports then: a Ray starts meanwhile, and who is to be forked waits.
    """
    place, users = folder / "forkserver", folder / "forkserver.users"
    with users.open("w") as mine:
        with alone(folder / "forkserver.lock"):
            fcntl.flock(mine, fcntl.LOCK_SH)
            if not place.exists():
                place.symlink_to(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a Unix socket's path has to be short
                start(place.resolve())
            path = place.resolve() / SOCKET
        try:
            yield f"{sys.executable} -S -E {CLIENT} {path}"
        finally:
            with alone(folder / "forkserver.lock"), suppress(BlockingIOError):
                fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)  # if nobody else uses it
                os.kill(int((path.parent / "pid").read_text()), signal.SIGKILL)
                place.unlink()
                shutil.rmtree(path.parent)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def start(place: Path) -> None:
    """Start a server; its socket, process id and the program by which a Ray starts workers are then in `place`."""
    path = place / SOCKET
    # OpenMP reads it where it is loaded, and that is there; `actors.client.connect` gives it to a local Ray's workers.
    variables = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    (place / WORKER).write_text(START_WORKER.format(folder=str(CLIENT.parent), path=str(path)))
    program = [sys.executable, "-m", "tests.support.forkserver", str(path)]
    with (place / "said").open("w") as said:
        server = subprocess.Popen(program, env=variables, stdout=said)
    (place / "pid").write_text(str(server.pid))
    while not path.exists():
        assert server.poll() is None, "the fork server did not start"
        time.sleep(0.01)
    _SERVERS.append(server)


def set_up_by(command: str) -> str:
    """The program by which a Ray starts its workers as forks of `command`'s server."""
    return str(Path(command.split()[-1]).with_name(WORKER))


@contextmanager
def forked(command: str) -> Iterator[None]:
    """Nodes and drivers that this process starts have forks of `command`'s server as workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SETUP_WORKER, set_up_by(command))
        for name, value in environment(command).items():
            patch.setenv(name, value)
        yield


def environment(command: str) -> dict[str, str]:
    """Variables that make a driver in a process of its own use `command`, as yielded by `shared`, for its workers."""
    return {
        SET_UP_BY: set_up_by(command),
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": command}}),
        "RAY_prestart_worker_first_driver": "0",  # it would start some that are not forks
    }


def program(command: str, file: str, *arguments: str) -> list[str]:
    """``python FILE ARGUMENTS``, of the repository, as a fork: the command of a client that ends as the fork does."""
    return [*command.split(), str(ROOT / file), *arguments]


def solrl(command: str, *arguments: str) -> list[str]:
    """The same of ``python -m solrl_ray ARGUMENTS``."""
    return program(command, "solrl_ray/__main__.py", *arguments)


def calling(command: str, function: Callable[..., None], *arguments: str) -> list[str]:
    """The same of the call of a module's function."""
    return program(command, "tests/support/calling.py", f"{function.__module__}:{function.__qualname__}", *arguments)


def serve(path: str) -> NoReturn:
    """Import, then hand each client on to the server that forks for its job, for ever."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)  # it is there once it listens
    preload(PRELOADED)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    jobs: dict[str, socket.socket] = {}
    while True:
        client, _ = listener.accept()
        try:
            message, streams = receive(client, len(STREAMS))
        except EOFError:  # the client was killed
            continue
        variables = of_ray(message["environment"])
        job = json.dumps(variables, sort_keys=True)
        if job not in jobs:
            jobs[job], requests = socket.socketpair()
            if os.fork() == 0:
                for other in (listener, client, *jobs.values()):
                    other.close()
                for stream in streams:
                    os.close(stream)
                serve_job(requests, variables)
            requests.close()
        send(jobs[job], message, [*streams, client.fileno()])
        for stream in streams:
            os.close(stream)
        client.close()


def serve_job(requests: socket.socket, variables: dict[str, str]) -> NoReturn:
    """Import Ray with these variables, then fork a worker for each client that is handed on."""
    for name in of_ray(os.environ):
        del os.environ[name]
    os.environ.update(variables)
    preload(WITH_RAY)
    while True:
        try:
            message, (*streams, client) = receive(requests, len(STREAMS) + 1)
        except EOFError:  # the other server has ended
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            become(message, streams, socket.socket(fileno=client))
        for descriptor in (*streams, client):
            os.close(descriptor)


def preload(modules: tuple[str, ...]) -> None:
    """Import them; forks share their objects, which no garbage collection writes to."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def of_ray(variables: Mapping[str, str]) -> dict[str, str]:
    """Ray's own among environment variables."""
    return {name: value for name, value in variables.items() if name.startswith("RAY_")}


def receive(sender: socket.socket, descriptors: int) -> tuple[dict[str, Any], list[int]]:
    """A message and its open files. Raises `EOFError` if none comes."""
    size, opened, _, _ = socket.recv_fds(sender, 8, descriptors)
    content = bytearray()
    while not size or len(content) < int.from_bytes(size):
        part = sender.recv(int.from_bytes(size) - len(content))
        if not part:
            raise EOFError
        content += part
    return json.loads(content), opened


def become(message: dict[str, Any], streams: list[int], client: socket.socket) -> NoReturn:
    """Go on as the program that the client was to run; the client is told its status, or sees that it was killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream, number in zip(streams, STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.setpgid(0, 0)  # when a worker has ended Ray ends its group, which must not be the server's
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["folder"])
    sys.argv = message["arguments"]
    sys.orig_argv = [sys.executable, *sys.argv]
    customize(os.environ.get("PYTHONPATH", ""))
    if SET_UP_BY in os.environ:
        module, _, name = SETUP_WORKER.rpartition(".")
        setattr(importlib.import_module(module), name, os.environ[SET_UP_BY])
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):  # it may be gone
        client.send(bytes([status]))
    os._exit(status)  # what the server has open is not this process's to tear down


def customize(folders: str) -> None:
    """Import the first ``sitecustomize`` of these folders, as an interpreter that starts does."""
    from importlib.util import module_from_spec, spec_from_file_location

    files = [os.path.join(folder, "sitecustomize.py") for folder in folders.split(os.pathsep) if folder]
    for file in filter(os.path.exists, files):
        spec = spec_from_file_location("sitecustomize", file)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(module_from_spec(spec))
        return


if __name__ == "__main__":
    serve(sys.argv[1])
