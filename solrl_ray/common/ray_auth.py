"""Authenticates this process to a Ray cluster, and finds this user's clusters on this machine.

Ray reads ``RAY_AUTH_MODE`` when it is first imported. Without it, Ray's commands disagree: a local start uses tokens, a
job submission does not. So we always set the mode before the import. The token stays where Ray looks for it
(``RAY_AUTH_TOKEN``, the file of ``RAY_AUTH_TOKEN_PATH``, ``~/.ray/auth_token``). It is never written to a
configuration, log or run folder.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import psutil

from solrl_ray.errors import RunError, UserError

CONNECT_SECONDS, ANSWER_SECONDS = 1.5, 10.0
"""Deadlines of `cluster_at`; a busy head may answer late."""
MODE = "RAY_AUTH_MODE"
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""The first request that Ray's clients send."""
TLS = "RAY_USE_TLS"
_RIGHT = (
    "it must be the address that `ray start --head` printed, such as head:6379 (not the dashboard's, 8265, nor Ray "
    "Client's, 10001)."
)


def settle(*, local: bool) -> str:
    """Set the mode in this process's environment unless it is set, and return it.

    `local`: a local Ray is about to be started. Then tokens are on, and Ray makes one if there is none. On an existing
    cluster, they are on if this user has a token.
    """
    mode = os.environ.get(MODE) or ("token" if local or token() else "disabled")
    os.environ[MODE] = mode
    return mode


def check_access(address: str, *, seconds: float, answer_seconds: float | None = None) -> None:
    """Check whether this user may join the cluster at ``host:port``; Ray itself would retry for minutes.

    Args:
        seconds: deadline for the connection.
        answer_seconds: deadline for the answer; None: `seconds`.

    Raises OSError if nothing listens there, RunError if the token is refused or no Ray head answers, UserError if
    `address` is a dashboard's or not an address.
    """
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"--address or RAY_ADDRESS is {address!r}, a dashboard, which is for `ray job submit`; it must be the Ray "
            "cluster's, such as head:6379."
        )
    if address in ("auto", "local"):  # Ray's names for its newest cluster on this machine, and for a new one
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        raise UserError(
            f"--address or RAY_ADDRESS is {address!r}; it must be the Ray cluster's host and port, such as head:6379, "
            "or auto for the one on this machine."
        )
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    if problem := _problem(f"{host}:{port}", seconds if answer_seconds is None else answer_seconds):
        raise RunError(f"the Ray cluster at {address} could not be joined: {problem}")


def cluster_at(address: str) -> None:
    """Raise RunError if no Ray answers at `address` or it refuses this user's token, UserError if it is a URL."""
    try:
        check_access(address, seconds=CONNECT_SECONDS, answer_seconds=ANSWER_SECONDS)
    except (OSError, ValueError) as error:
        raise RunError(f"the Ray cluster at {address} could not be joined: {error}") from error


def clusters_here() -> list[str]:
    """Addresses of this user's Ray clusters with a node on this machine; inside a cluster, only that one.

    Nodes are found by this user's processes. Addresses in files are not trusted: another user could have written them,
    and the server at an address gets the token and answers with pickled objects.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return [ray.get_runtime_context().gcs_address]
    addresses = set()
    for process in psutil.process_iter(["uids", "cmdline"]):
        owner, command = process.info["uids"], process.info["cmdline"]
        if owner and command and owner.real == os.getuid() and Path(command[0]).name == "raylet":
            flag = "--gcs-address="
            addresses |= {word.removeprefix(flag) for word in command if word.startswith(flag)}
    return sorted(addresses)


def refusal() -> str:
    """The problem and the remedy, if a server refuses `headers`."""
    has = "it refuses this user's token, which is wrong" if headers() else "it wants a token, and this user has none"
    return (
        f"{has}; `ray get-auth-token` on its head prints the right one, which belongs into RAY_AUTH_TOKEN, with "
        "RAY_AUTH_MODE=token."
    )


def headers() -> dict[str, str]:
    """Headers for requests to Ray's servers."""
    given = token() if os.environ.get(MODE) != "disabled" else ""
    return {"authorization": f"Bearer {given}"} if given else {}


def _problem(address: str, seconds: float) -> str:
    """The reason why this user cannot join the server at `address`; empty if it is a Ray head that accepts the token.

    With Ray's TLS, only Ray can check; the result is then empty, too.
    """
    try:
        import grpc  # late: takes a tenth of a second; Ray depends on it
    except ImportError:
        return ""
    if os.environ.get(TLS, "").lower() in ("1", "true"):
        return ""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        same = bytes  # the request has no fields, and the answer is not read
        check_alive = channel.unary_unary(ALIVE, request_serializer=same, response_deserializer=same)
        try:
            check_alive(b"", timeout=seconds, metadata=list(headers().items()))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return refusal()
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"the server there did not answer within {seconds:g} s; {_RIGHT}"
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE):
                return f"the server there is not a Ray head; {_RIGHT}"
    return ""


def token() -> str:
    """This user's token, from the places where Ray looks for it; empty if there is none."""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
