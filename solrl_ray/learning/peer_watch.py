"""Notices that another rank of the learner group is gone, and ends collectives that would wait for it for ever.

A rank that dies closes its connections. So every rank keeps one to rank 0, which closes all when one of them closes.
gloo's collectives notice a lost rank themselves; a kernel of NCCL may wait until it is aborted.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from selectors import EVENT_READ, BaseSelector, DefaultSelector

import torch
import torch.distributed

from solrl_ray.config.problems import counted
from solrl_ray.errors import PeerGone, RunError

LOOK_SECONDS = 0.2
"""Seconds between two looks at whether this rank leaves."""
ABORT_SECONDS = 30.0
"""Limit of aborting the group's collectives."""
LEAVES = b"."
"""Sent by a rank that leaves the group without failure."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds and probes after which the connection to a lost node counts as closed. That of a lost process closes at once,
unless it has forks that live on.
"""


class PeerWatch:
    def __init__(
        self, rank: int, world_size: int, address: str, device: torch.device, seconds: float, abort: Callable[[], None]
    ) -> None:
        """Connect the ranks, which have just joined the process group. Collective.

        Args:
            address: host name or IP of rank 0.
            device: on which the group's collectives work.
            seconds: limit of connecting.
            abort: ends the group's collectives; called in another thread when a rank is lost.

        Raises RunError or `OSError`: a rank did not connect.
        """
        self._rank, self._lost, self._leaves, self._abort = rank, False, threading.Event(), abort
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
        """Raises PeerGone if a rank is lost: the update cannot end."""
        if self._lost:
            raise PeerGone(f"learning on rank {self._rank}", "the connection to another rank of its group is closed")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A block with collectives. If a rank is lost meanwhile it raises PeerGone, whatever came of the block: an
        aborted collective may return numbers of no use.
        """
        try:
            yield
        except Exception:
            self.check()
            raise
        self.check()

    def close(self) -> None:
        """Leave the group without alarming the others. Call before the process group is left.

        Raises RunError: aborting the collectives takes too long.
        """
        self._leaves.set()
        self._thread.join(ABORT_SECONDS)
        if self._thread.is_alive():
            raise RunError(f"aborting the collectives of learner rank {self._rank} took over {ABORT_SECONDS:g} s")
        for peer in self._peers:
            with contextlib.suppress(OSError):  # the other one is gone
                peer.sendall(LEAVES)
            peer.close()

    def _watch(self) -> None:
        with DefaultSelector() as connections:
            for peer in self._peers:
                connections.register(peer, EVENT_READ, peer)
            while connections.get_map() and not self._leaves.is_set():
                for key, _ in connections.select(LOOK_SECONDS):
                    if not _leaves(key.data):
                        self._alarm()
                        return
                    connections.unregister(key.data)

    def _alarm(self) -> None:
        self._lost = True
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        self._abort()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accepted(listener: socket.socket, count: int, key: bytes, seconds: float) -> list[socket.socket]:
    """`count` connections that begin with `key`; others are closed."""
    ends, found, sent = time.monotonic() + seconds, list[socket.socket](), dict[socket.socket, bytes]()
    with DefaultSelector() as ready:
        ready.register(listener, EVENT_READ, listener)
        try:
            while len(found) < count:
                left = ends - time.monotonic()
                if left <= 0 or not (events := ready.select(left)):
                    missing = counted(count - len(found), "rank")
                    raise RunError(f"{missing} did not connect to learner rank 0 within {seconds:g} s")
                for event in events:
                    _on_ready(event[0].data, listener, key, ready, found, sent)
        except BaseException:
            for peer in found:
                peer.close()
            raise
        finally:
            for peer in sent:
                peer.close()
    return found


def _on_ready(
    source: socket.socket,
    listener: socket.socket,
    key: bytes,
    ready: BaseSelector,
    found: list[socket.socket],
    sent: dict[socket.socket, bytes],
) -> None:
    """Accept a connection, or read more of its key."""
    if source is listener:
        peer, _ = listener.accept()
        sent[peer] = b""
        ready.register(peer, EVENT_READ, peer)
        return
    more = b""
    with contextlib.suppress(OSError):
        more = source.recv(len(key) - len(sent[source]))
    sent[source] += more
    if more and key.startswith(sent[source]) and len(sent[source]) < len(key):
        return
    ready.unregister(source)
    if sent.pop(source) == key:
        found.append(source)
    else:
        source.close()


def _leaves(peer: socket.socket) -> bool:
    """Whether a readable connection says that its rank leaves; else it is closed or broken."""
    with contextlib.suppress(OSError):
        return peer.recv(1) == LEAVES
    return False
