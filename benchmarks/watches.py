"""Threads that look at this machine while a run trains: use and memory of its GPUs, and pinned main memory."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from common import gpus

PINNED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-s .*(/dev/zero|/dev/nvidia|/memfd:)")
"""A shared mapping of memory of the host, in /proc/PID/maps."""


class Watch(threading.Thread):
    """Use and memory of each GPU over time, from nvidia-smi, twice a second."""

    QUERY = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, int, float, float]] = []
        """Time since 1970, GPU, percent, GB."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        command = [*self.QUERY, "-lms", "500", *(["-i", seen] if seen else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if gpus() else None

    def run(self) -> None:
        for line in self._process.stdout or () if self._process else ():
            index, used, memory = line.split(",")
            self.seen.append((time.time(), int(index), float(used), float(memory) * 2**20 / 1e9))

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()

    def busy(self, began: float, ended: float) -> list[float]:
        """Share of that time in which a GPU ran a kernel, by GPU."""
        shares: defaultdict[int, list[float]] = defaultdict(list)
        for at, index, used, _ in self.seen:
            if began <= at <= ended:
                shares[index].append(used / 100)
        return [round(statistics.fmean(shares[index]), 3) for index in sorted(shares)]

    def peaks(self) -> list[float]:
        """GB, by GPU."""
        most: defaultdict[int, float] = defaultdict(float)
        for _, index, _, memory in self.seen:
            most[index] = max(most[index], memory)
        return [round(most[index], 1) for index in sorted(most)]


class PinnedWatch(threading.Thread):
    """The most that was pinned above what was at the start, looked at every 2 s."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = pinned_bytes()
        self._most = self._before
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(2.0):
            self._most = max(self._most, pinned_bytes())

    def stop(self) -> float:
        """GB."""
        self._done.set()
        return round((self._most - self._before) / 1e9, 2)


def pinned_bytes() -> int:
    """Host memory that processes with a GPU may have pinned: shared mappings of memory, which is what CUDA's own
    allocator and this project's copies of weights are.
    """
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = (folder / "maps").read_text()
            if "/dev/nvidia" in maps:
                found += sum(map(mapped, maps.splitlines()))
    return found


def mapped(line: str) -> int:
    match = PINNED.match(line)
    return int(match[2], 16) - int(match[1], 16) if match else 0
