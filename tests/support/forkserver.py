"""Ray's workers, and drivers, as forks of one process that has imported what they import: seconds less for each one.

Most tests of the system start a handful of workers, and two cores would be busy with nothing but importing the same
libraries again. Ray is told to start its workers by `COMMAND` (``py_executable`` of a runtime environment), a bare
interpreter that hands its arguments, environment, working folder and streams to the server and waits. The server
forks; the fork goes on as the worker that would have been. It is a process of its own: it can be killed like any other.

Drivers in processes of their own are told by `environment`, the way Ray's Job server tells those that it starts. They
are forks themselves if they are started by `solrl`, or by `calling`.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STREAMS = (0, 1, 2)
KILLED = 137
"""Exit status of the client of a fork that did not end by itself, as a shell has it."""
MAIN = "solrl_ray/__main__.py"
READY = b"ready"
PRELOADED = (
    "solrl_ray.models.flux",
    "solrl_ray.rewards.clip",
    "solrl_ray.learning.learner",
    "solrl_ray.report.page",
    "solrl_ray.report.tensorboard",
    "peft",
    "deepspeed",
    "matplotlib.backends.backend_svg",
    "tensorboard.summary.writer.record_writer",
    "tensorboard.compat.proto.event_pb2",
    "jsonschema",
    "wcwidth",
)
"""What the workers of a run on the testbed import, and what Ray does; not Ray, which reads its environment then."""


@contextmanager
def serving(place: Path) -> Iterator[str]:
    """A server for as long as the ``with`` block lasts; yields the command for ``py_executable``.

    It still imports then: a Ray starts meanwhile, and who is to be forked waits.

    Args:
        place: a folder with a short path, for it holds a Unix socket.
    """
    path = place / "forks"
    # OpenMP reads it where it is loaded, and that is there; `actors.client.connect` gives it to a local Ray's workers.
    variables = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    command = [sys.executable, "-m", "tests.support.forkserver", path]
    server = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        assert any(line.strip() == READY for line in server.stdout), "the fork server did not start"
        yield f"{sys.executable} -S -E {__file__} {path}"
    finally:
        server.kill()
        server.wait()


def environment(command: str) -> dict[str, str]:
    """Variables that make a driver in a process of its own use `command`, as yielded by `serving`, for its workers."""
    return {
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": command}}),
        "RAY_prestart_worker_first_driver": "0",  # it would start some that are not forks
    }


def solrl(command: str, *arguments: str) -> list[str]:
    """``python -m solrl_ray ARGUMENTS`` as a fork: the command of a client that ends as the fork does."""
    return [*command.split(), str(Path(__file__).parents[2] / MAIN), *arguments]


def calling(command: str, function: Callable[..., None], *arguments: str) -> list[str]:
    """The call of a module's function as a fork: the command of a client that ends as the fork does."""
    program = str(Path(__file__).with_name("calling.py"))
    return [*command.split(), program, f"{function.__module__}:{function.__qualname__}", *arguments]


def serve(path: str) -> None:
    """Import, then fork a worker for each client, for ever."""
    import gc
    import signal

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print(READY.decode(), flush=True)
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # nothing of this is written to, so the forks share it
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        client, _ = listener.accept()
        message, streams = receive(client)
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(message, streams, client)
        for stream in streams:
            os.close(stream)
        client.close()


def receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size, ancillary, _, _ = client.recvmsg(8, socket.CMSG_LEN(len(STREAMS) * array.array("i").itemsize))
    streams = array.array("i")
    streams.frombytes(ancillary[0][2])
    with client.makefile("rb") as content:
        return json.loads(content.read(int.from_bytes(size))), list(streams)


def become(message: dict[str, Any], streams: list[int], client: socket.socket) -> None:
    """Go on as the program that the client was to run; the client is told its status, or sees that it was killed."""
    import runpy
    import traceback

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


def ask(path: str, arguments: list[str]) -> None:
    """The client: have `arguments` run by a fork, and end when and as it has ended."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    message = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    content = json.dumps(message).encode()
    rights = array.array("i", STREAMS)
    server.sendmsg([len(content).to_bytes(8)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    server.sendall(content)
    sys.exit(*server.recv(1) or [KILLED])


if __name__ == "__main__":
    if __spec__ is None:
        ask(sys.argv[1], sys.argv[2:])
    else:
        serve(sys.argv[1])
