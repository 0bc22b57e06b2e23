"""A thread that samples utilisation and memory of this machine's GPUs while a run trains."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections import defaultdict

from common import gpus


class Watch(threading.Thread):
    """Samples utilisation and memory of each GPU with nvidia-smi, twice per second."""

    QUERY = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, int, float, float]] = []
        """Samples: seconds since 1970, GPU index, utilisation in percent, memory in GB."""
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
        """Share of the time from `began` to `ended` in which a kernel was running, per GPU."""
        shares: defaultdict[int, list[float]] = defaultdict(list)
        for at, index, used, _ in self.seen:
            if began <= at <= ended:
                shares[index].append(used / 100)
        return [round(statistics.fmean(shares[index]), 3) for index in sorted(shares)]

    def peaks(self) -> list[float]:
        """Peak memory in GB, per GPU."""
        most: defaultdict[int, float] = defaultdict(float)
        for _, index, _, memory in self.seen:
            most[index] = max(most[index], memory)
        return [round(most[index], 1) for index in sorted(most)]
