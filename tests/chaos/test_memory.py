"""A long run needs no more memory at its end than soon after its start: processes, and the object store."""

from __future__ import annotations

import json
import statistics
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from actors import commands
from tests.chaos.notes import Reader
from tests.chaos.noting import ROLES
from tests.small import folder, small_config, summary

pytestmark = pytest.mark.usefixtures("local_ray")

ITERATIONS = 200
SETTLED = 50
"""Iterations after which imports, caches and allocators have what they need."""
WINDOW = 30
SMALLEST = (
    f"run.iterations={ITERATIONS}",
    "rollout={prompts: 2, pool: 4, keep: 2, solver: euler}",
    "rollout.preview={steps: 1, micro_batch: 4, precision: nvfp4-emulated}",
    "rollout.full={steps: 2, micro_batch: 2}",
    "evaluation={every: 0, prompts: 1, samples: 1, steps: 1, pictures: 0, reference: ''}",
)
ALLOWED = {"controller": 40.0, "selector": 25.0, "explorer": 40.0, "regenerator": 30.0, "learner": 15.0, "store": 2.0}
"""kB an iteration: of processes what allocators and Ray's own bookkeeping come to (see docs/reliability.md), and less
than that with what each of them could keep for ever: an iteration's samples (25 kB; explorers have none) or a revision
(540 kB)."""


def private_kb(pid: int) -> float:
    """Memory that is this process's alone, so without the object store that it maps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: float(line.split()[1]) for line in lines}
    return sizes["Private_Clean"] + sizes["Private_Dirty"]


class Watch:
    """Takes a sample of everybody's memory after each iteration."""

    def __init__(self, root: Path, run: Path) -> None:
        self._reader = Reader(root / "notes.jsonl")
        self._run = run
        self._ray = get_state_from_address(ray.get_runtime_context().gcs_address)
        self.samples: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._over = threading.Event()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        thread = threading.Thread(target=self._work, name="memory-watch")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(60.0)

    def _work(self) -> None:
        seen = 0
        while not self._over.wait(0.1):
            metrics = self._run / "metrics.jsonl"
            done = metrics.read_text().count('"event": "iteration"') if metrics.exists() else 0
            if done > seen:
                seen = done
                self._sample(done)

    def _sample(self, iteration: int) -> None:
        pids = {note.slot.partition("-")[0]: note.pid for note in self._reader.living()}
        pids["controller"] = int((self._run / "lock").read_text().split()[1])
        for role, pid in pids.items():
            try:
                self.samples[role].append((iteration, private_kb(pid)))
            except OSError:  # it ended meanwhile, as all do after the last iteration
                continue
        store = get_memory_info_reply(self._ray).store_stats.object_store_bytes_used
        self.samples["store"].append((iteration, store / 1024))

    def around(self, role: str, first: int) -> float:
        """kB in the window that begins at iteration `first`."""
        window = [kb for iteration, kb in self.samples[role] if first <= iteration < first + WINDOW]
        assert len(window) >= 5, f"too few samples of {role}"
        return statistics.median(window)

    def growth(self, role: str, first: int = SETTLED, last: int = ITERATIONS - WINDOW) -> float:
        """kB an iteration between two windows, by default one when all had settled and one at the end."""
        return round((self.around(role, last) - self.around(role, first)) / (last - first), 2)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_memory_does_not_grow_over_200_iterations(tmp_path: Path) -> None:
    config = small_config(tmp_path, "long", *SMALLEST)
    watch = Watch(tmp_path, folder(config))
    with watch.at_work():
        commands.train(config, live=False, roles=ROLES)
    assert summary(config)["iterations"] == ITERATIONS
    growth = {role: watch.growth(role) for role in ALLOWED}
    middle = (SETTLED + ITERATIONS - WINDOW) // 2
    print(json.dumps({"kB an iteration": growth, "in the later half": {r: watch.growth(r, middle) for r in ALLOWED}}))
    assert {role: kb for role, kb in growth.items() if kb > ALLOWED[role]} == {}
