"""The client of `tests.support.forkserver`: has a program run by a fork, and ends when and as that has ended.

    python fork_client.py SOCKET PROGRAM ARGUMENT…

It is started once for each worker, and imports little.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
from collections.abc import Sequence

STREAMS = (0, 1, 2)
KILLED = 137
"""Exit status of the client of a fork that did not end by itself, as a shell has it."""
OF_SETUP = ("--language=", "--serialized-runtime-env-context=")
"""Arguments that Ray has for what sets a worker up, and not for the worker."""


def ask(path: str, arguments: Sequence[str]) -> None:
    """Have `arguments` run by a fork of the server whose socket is at `path`, and end as the fork does."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    message = {"arguments": list(arguments), "environment": dict(os.environ), "folder": os.getcwd()}
    send(server, message, STREAMS)
    sys.exit(*server.recv(1) or [KILLED])


def set_up(path: str) -> None:
    """Start the worker of this process's arguments, as Ray's ``setup_worker.py`` does, but as a fork."""
    ask(path, [argument for argument in sys.argv[1:] if not argument.startswith(OF_SETUP)])


def send(to: socket.socket, message: object, descriptors: Sequence[int]) -> None:
    """A message, and open files."""
    content = json.dumps(message).encode()
    rights = array.array("i", descriptors)
    to.sendmsg([len(content).to_bytes(8)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    to.sendall(content)


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2:])
