"""A long run holds no more at its end than soon after its start: memory, open files, threads, the object store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import memory

ITERATIONS = 200
ALLOWED_KB = 12.0
"""An iteration, of what a process holds: half of the least that it could keep for ever, an iteration's samples (25 kB);
a revision would be 540 kB."""
ALLOWED_STORE_KB = 4.0
ALLOWED_SHARE = 0.05
"""By which the system may have given a process more in the end: what its allocator has back and keeps."""


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_memory_does_not_grow_over_200_iterations(tmp_path: Path, staleness: int) -> None:
    out = tmp_path / "memory.json"
    command = [sys.executable, "-m", "tests.chaos.memory", "--iterations", str(ITERATIONS), "--json", str(out)]
    command += ["--set", f"rollout.max_staleness={staleness}"]
    subprocess.run(command, env=memory.environment(), check=True, timeout=1200, stdout=subprocess.DEVNULL)
    actors = json.loads(out.read_text())["actors"]
    print(json.dumps(actors))
    roles = {name.partition("-")[0] for name in actors}
    assert roles == {"controller", "encoder", "selector", "explorer", "regenerator", "learner", "object store"}
    grow = {name: row for name, row in actors.items() if row["held_an_iteration"] > ALLOWED_KB}
    assert grow == {}
    assert actors["object store"]["held_an_iteration"] <= ALLOWED_STORE_KB
    processes = {name: row for name, row in actors.items() if name != "object store"}
    assert {name: row for name, row in processes.items() if row["given_grew"] > ALLOWED_SHARE} == {}
    # A descriptor or a thread that stays in every twentieth iteration.
    leaks = {n: r for n, r in processes.items() if max(r["files_an_iteration"], r["threads_an_iteration"]) > 0.05}
    assert leaks == {}
