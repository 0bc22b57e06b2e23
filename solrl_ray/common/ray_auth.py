"""How this process may speak to a Ray cluster: always with an explicit authentication mode.

Ray reads ``RAY_AUTH_MODE`` when it is first imported, and without it its commands disagree: a local start switches
tokens on, a job submission does not. So the mode is settled before. The token itself stays where Ray looks for it
(``RAY_AUTH_TOKEN``, the file of ``RAY_AUTH_TOKEN_PATH``, ``~/.ray/auth_token``) and enters no configuration, log or
run folder.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from solrl_ray.errors import RunError, UserError

MODE = "RAY_AUTH_MODE"
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""What Ray's own clients ask first."""


def settle(*, local: bool) -> str:
    """Set the mode in this process's environment unless the user did, and return it.

    Args:
        local: a local Ray is about to be started. Then tokens are on, and Ray makes one if there is none; on a
            cluster that is there already they are on if this user has a token.
    """
    mode = os.environ.get(MODE) or ("token" if local or token() else "disabled")
    os.environ[MODE] = mode
    return mode


def knock(address: str, *, seconds: float) -> None:
    """Ask at ``host:port`` whether this user may join, which Ray itself would ask for minutes.

    Raises OSError if nobody listens there, RunError if the user's token is refused, UserError if it is the address of a
    dashboard.
    """
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"--address or RAY_ADDRESS is {address!r}, a dashboard, which is for solrl submit; it must be the Ray "
            "cluster's, such as head:6379."
        )
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
        if _is_refused(f"{host}:{port}", seconds):
            raise RunError(f"the Ray cluster at {address} could not be joined: {refusal()}")


def refusal() -> str:
    """What is wrong, and would be right, where what `headers` has is not let in."""
    has = "it refuses this user's token, which is wrong" if headers() else "it wants a token, and this user has none"
    return (
        f"{has}; `ray get-auth-token` on its head prints the right one, which belongs into RAY_AUTH_TOKEN, with "
        "RAY_AUTH_MODE=token."
    )


def headers() -> dict[str, str]:
    """With which Ray's servers are asked."""
    given = token() if os.environ.get(MODE) != "disabled" else ""
    return {"authorization": f"Bearer {given}"} if given else {}


def _is_refused(address: str, seconds: float) -> bool:
    """Whether a Ray there does not let this user in; not of one that does not answer, or speaks TLS."""
    try:
        import grpc  # late: a tenth of a second; Ray brings it
    except ImportError:
        return False
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        same = bytes  # the question has no fields, and nobody reads the answer
        ask = channel.unary_unary(ALIVE, request_serializer=same, response_deserializer=same)
        try:
            ask(b"", timeout=seconds, metadata=list(headers().items()))
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


def token() -> str:
    """This user's token, where Ray looks for it; empty if there is none."""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
