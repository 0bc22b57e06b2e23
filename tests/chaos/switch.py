"""A switch in user space: machines of one's own on this one, joined by links that can be slow, lossy, narrow or cut.

    node-1 (network namespace, 10.9.0.1) ── TAP ──┐
    node-2 (network namespace, 10.9.0.2) ── TAP ──┼── `Switch`: a thread that forwards Ethernet frames
    node-3 …                                ── TAP ──┘

Each node is a process that holds a network, mount and host-name namespace, with a /tmp of its own. An ordinary user may
make all of it inside a user namespace (`inside`), whose end ends every process in it.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import math
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

INSIDE = "SOLRL_TESTS_INSIDE"
NAMESPACES = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
)
TUNSETIFF, TAP_WITHOUT_HEADER, NEW_NETWORK = 0x400454CA, 0x1002, 0x40000000
FRAME = 65_536
MTU = 9000
"""Bytes; larger frames than usual, because each costs the switch the same."""
BUFFER = 0.5
"""Seconds of a narrow link's rate that wait for it; what comes then is dropped."""


def why_not() -> str:
    """Why this machine lets its user have no such networks; empty if it does."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    probe = "import os; os.close(os.open('/dev/net/tun', os.O_RDWR))"
    try:
        command = [*NAMESPACES, "sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, probe]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else f"a user may have no networks here: {done.stderr.strip()}"


def inside(module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a module where networks can be made; with it, all processes that it starts end."""
    return [*NAMESPACES, "env", f"{INSIDE}=1", sys.executable, "-m", module, *arguments]


@dataclass
class Link:
    """From one node to another; the other direction is another link."""

    delay: float = 0.0
    """Seconds."""
    loss: float = 0.0
    """Share of the frames."""
    rate: float = math.inf
    """Bytes per second."""
    cut: bool = False
    free: float = 0.0
    """When the frames before have passed."""


class Node:
    """A machine: `number` 1 is 10.9.0.1."""

    def __init__(self, number: int, tmp: Path) -> None:
        self.number, self.tmp = number, tmp
        self.address = f"10.9.0.{number}"
        tmp.mkdir()
        program = f"hostname node-{number}; mount --bind '{tmp}' /tmp; ip link set lo up; echo up; exec sleep infinity"
        command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", program]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"
        self._space = os.stat(f"/proc/{self.process.pid}/ns/net").st_ino
        self.tap = self._open_tap()
        for words in (
            f"link set tap0 address {self.mac.hex(':')} mtu {MTU} up",
            f"addr add {self.address}/24 dev tap0",
            "route add default via 10.9.0.254",
        ):
            subprocess.run(self.command("ip", *words.split()), check=True)

    @property
    def mac(self) -> bytes:
        return bytes((2, 0, 0, 0, 0, self.number))

    def command(self, *program: str) -> list[str]:
        """The program, run on this node."""
        return ["nsenter", f"--target={self.process.pid}", "--net", "--mount", "--uts", *program]

    def start(self, *program: str, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(*program), env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT
            )

    def pids(self, name: str = "") -> list[int]:
        """Of the processes of this node, with this name if one is given, without the one that holds it."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                here = (folder / "ns/net").stat().st_ino == self._space and int(folder.name) != self.process.pid
                if here and name in (folder / "comm").read_text():
                    found.append(int(folder.name))
        return found

    def kill(self, name: str = "", *, spare: frozenset[int] = frozenset()) -> None:
        for pid in {*self.pids(name)} - spare:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)

    def _open_tap(self) -> int:
        """Opened by a thread that has entered the network: its frames are this process's to forward."""
        opened: list[int] = []

        def enter() -> None:
            with open(f"/proc/{self.process.pid}/ns/net", "rb") as space:
                assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), NEW_NETWORK) == 0, ctypes.get_errno()
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"tap0", TAP_WITHOUT_HEADER))
            opened.append(tap)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return opened[0]


class Switch(threading.Thread):
    def __init__(self, nodes: Sequence[Node], seed: int = 1) -> None:
        super().__init__(name="switch", daemon=True)
        self._nodes = {node.number: node for node in nodes}
        self.links = {(a, b): Link() for a in self._nodes for b in self._nodes if a != b}
        self._chance = random.Random(seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        """Due time, order, receiver and frame."""
        self._count = 0

    def set(self, among: Sequence[tuple[int, int]] | None = None, **values: float) -> None:
        """Change links: all of them, or these."""
        for pair in among or self.links:
            for name, value in values.items():
                setattr(self.links[pair], name, value)

    def isolate(self, *numbers: int, cut: bool = True) -> None:
        """Cut all links to and from these nodes, or heal them."""
        self.set([pair for pair in self.links if {*pair} & {*numbers}], cut=cut)

    def run(self) -> None:
        poll, by_tap = select.poll(), {node.tap: number for number, node in self._nodes.items()}
        for tap in by_tap:
            poll.register(tap, select.POLLIN)
        while True:
            wait = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else 1.0
            for tap, _ in poll.poll(math.ceil(wait * 1000)):
                with suppress(BlockingIOError):
                    for _ in range(64):
                        self._take(by_tap[tap], os.read(tap, FRAME))
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, _, receiver, frame = heapq.heappop(self._waiting)
                with suppress(OSError):
                    os.write(self._nodes[receiver].tap, frame)

    def _take(self, sender: int, frame: bytes) -> None:
        group, now = bool(frame[0] & 1), time.monotonic()
        for number, node in self._nodes.items():
            if number == sender or not (group or frame[:6] == node.mac):
                continue
            link = self.links[sender, number]
            begins = max(now, link.free)
            if link.cut or self._chance.random() < link.loss or begins - now > BUFFER:
                continue
            link.free = begins + len(frame) / link.rate
            self._count += 1
            heapq.heappush(self._waiting, (link.free + link.delay, self._count, number, frame))
