"""Notices that another rank of the learner group is gone, and ends collectives that would wait for it for ever.

A rank that dies closes its connections. So every rank keeps one to rank 0, which closes all when one of them closes.
gloo's collectives notice a lost rank themselves; a kernel of NCCL on the same host waits until it is aborted.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
from collections.abc import Callable

import torch
import torch.distributed

from solrl_ray.errors import RunError

LOOK_SECONDS = 0.2
"""Seconds between two looks at whether this rank leaves."""
LEAVES = b"."
"""Sent by a rank that leaves the group without failure."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds and probes after which the connection to a lost node counts as closed."""


class PeerWatch:
    def __init__(
        self, rank: int, world_size: int, address: str, device: torch.device, seconds: float, abort: Callable[[], None]
    ) -> None:
        """Connect the ranks, which have just joined the process group. Collective.

        Args:
            address: host name or IP of rank 0.
            device: on which the group's collectives work.
            seconds: limit of each connection.
            abort: called in another thread when a rank is lost.
        """
        self._lost, self._leaves = False, threading.Event()
        self._abort = abort
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(_listener()) if rank == 0 else None
            told = [listener.getsockname()[1], secrets.randbits(62)] if listener else [0, 0]
            agreed = torch.tensor(told, dtype=torch.int64, device=device)
            torch.distributed.all_reduce(agreed)
            port, token = map(int, agreed)
            key = token.to_bytes(8)
            if listener is None:
                self._peers = [socket.create_connection((address, port), timeout=seconds)]
                self._peers[0].sendall(key)
            else:
                self._peers = _accepted(listener, world_size - 1, key, seconds)
        for peer in self._peers:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
        self._thread = threading.Thread(target=self._watch, name="peer watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RunError if a rank is lost: the update cannot end."""
        if self._lost:
            raise RunError("another rank of the learner group is gone, so this update cannot end")

    def close(self) -> None:
        """Leave the group without alarming the others. Call before the process group is left."""
        self._leaves.set()
        self._thread.join()
        for peer in self._peers:
            with contextlib.suppress(OSError):  # the other one is gone
                peer.sendall(LEAVES)
            peer.close()

    def _watch(self) -> None:
        watched = list(self._peers)
        while watched and not self._leaves.is_set():
            for peer in select.select(watched, [], [], LOOK_SECONDS)[0]:
                if _leaves(peer):
                    watched.remove(peer)
                    continue
                self._lost = True
                for each in self._peers:
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                self._abort()
                return


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accepted(listener: socket.socket, count: int, key: bytes, seconds: float) -> list[socket.socket]:
    """`count` connections that begin with `key`; others are closed."""
    listener.settimeout(seconds)
    found: list[socket.socket] = []
    while len(found) < count:
        peer, _ = listener.accept()
        peer.settimeout(seconds)
        if peer.recv(len(key), socket.MSG_WAITALL) == key:
            found.append(peer)
        else:
            peer.close()
    return found


def _leaves(peer: socket.socket) -> bool:
    """Whether a readable connection says that its rank leaves; else it is closed or broken."""
    with contextlib.suppress(OSError):
        return peer.recv(1) == LEAVES
    return False
