"""What a process holds, as it sees it itself."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Any

HELD, GIVEN = "held", "given"


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


def sizes(_: Any = None) -> dict[str, float]:
    """Of this process, kB; called inside actors."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    rollup = {line.split(":")[0]: float(line.split()[1]) for line in lines}
    found = {
        HELD: (info.uordblks + info.hblkhd) / 1024,
        GIVEN: rollup["Private_Clean"] + rollup["Private_Dirty"],  # without the object store, which it maps
        "files": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(len(os.listdir("/proc/self/task"))),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.memory_allocated() / 1024
    return found
