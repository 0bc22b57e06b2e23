"""What the processes of a long run hold, and whether that grows.

    python -m tests.chaos.memory --iterations 200 [--set KEY=VALUE …] [--json FILE]

The smallest run of the testbed. Every few iterations each actor is asked what it holds: bytes that its allocator has
handed out and not got back (Python's objects included, after a garbage collection), open files, threads, GPU memory of
tensors; and what the system has given it, which is more: allocators keep what they get back, in pieces. Trends are the
median of the slopes between all pairs of samples (Theil and Sen), which a single step does not move.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from actors.client import launch
from actors.cluster.names import namespace
from tests.chaos.held import GIVEN, HELD, sizes
from tests.support.small import folder, small_config

SETTLED = 50
"""Iterations after which imports, caches and allocators have what they need."""
EVERY = 5
"""Iterations between two samples."""
SMALLEST = (
    "rollout={prompts: 2, pool: 4, keep: 2, solver: euler}",
    "rollout.explore={steps: 1, micro_batch: 4, precision: nvfp4-emulated}",
    "rollout.regenerate={steps: 2, micro_batch: 2}",
    "evaluation={every: 0, prompts: 1, samples: 1, steps: 1, pictures: 0, reference: ''}",
)


def environment() -> dict[str, str]:
    """For this program: Python takes all its memory from the allocator that is asked."""
    return dict(os.environ, PYTHONMALLOC="malloc")


class Watch:
    """Asks all actors of a run, and the object store, every few iterations."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._ray = get_state_from_address(ray.get_runtime_context().gcs_address)
        self._over = threading.Event()
        self._error: Exception | None = None
        self.samples: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
        """(actor, what) → (iteration, value)."""

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._work, name="memory-watch")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(120.0)
        assert not self._thread.is_alive(), "the watch still waits for an actor's answer"
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._follow()
        except Exception as error:  # told in `__exit__`
            self._error = error

    def _follow(self) -> None:
        due = 0
        while not self._over.wait(0.1):
            metrics = self._run / "metrics.jsonl"
            done = metrics.read_text().count('"event": "iteration"') if metrics.exists() else 0
            if done >= due:
                self._sample(done)
                due = done + EVERY

    def _sample(self, iteration: int) -> None:
        space = namespace(self._run)
        names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == space]
        for name in names:
            try:
                handle = ray.get_actor(name, namespace=space)
                found = ray.get(handle.__ray_call__.remote(sizes), timeout=60.0)
            except (ValueError, ray.exceptions.RayActorError):  # it ended meanwhile, as all do in the end
                continue
            for what, value in found.items():
                self.samples[name, what].append((iteration, value))
        used = get_memory_info_reply(self._ray).store_stats.object_store_bytes_used
        self.samples["object store", HELD].append((iteration, used / 1024))


def trend(samples: list[tuple[int, float]]) -> float:
    """Growth an iteration: the median slope between all pairs of samples."""
    slopes = [(later - value) / (then - at) for (at, value), (then, later) in combinations(samples, 2) if then > at]
    return statistics.median(slopes)


def table(watch: Watch) -> dict[str, dict[str, float]]:
    """Of each actor, after `SETTLED` iterations: growth an iteration of what it holds (kB), the same of the later half
    of the samples, and how much that is; and by what share the system gave it more, from the first to the last quarter
    of the samples."""
    rows: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, what), samples in watch.samples.items():
        settled = [sample for sample in samples if sample[0] >= SETTLED]
        if len(settled) < 8:
            continue  # who joined late or left
        quarter = len(settled) // 4
        first, last = ([value for _, value in part] for part in (settled[:quarter], settled[-quarter:]))
        if what == GIVEN:
            rows[name]["given_kb"] = statistics.median(last)
            rows[name]["given_grew"] = statistics.median(last) / statistics.median(first) - 1
        else:
            rows[name][f"{what}_an_iteration"] = trend(settled)
            rows[name][f"{what}_an_iteration_late"] = trend(settled[len(settled) // 2 :])
            rows[name][what] = statistics.median(last)
    return dict(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if os.environ.get("PYTHONMALLOC") != "malloc":
        os.execve(sys.executable, [sys.executable, "-m", "tests.chaos.memory", *sys.argv[1:]], environment())
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="warning")
    with tempfile.TemporaryDirectory() as root:
        config = small_config(Path(root), "long", *SMALLEST, f"run.iterations={arguments.iterations}", *arguments.set)
        with Watch(folder(config)) as watch:
            launch.train(config, live=False)
    rows = table(watch)
    for name, row in rows.items():
        print(f"{name:14}", "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if arguments.json:
        content = {"iterations": arguments.iterations, "set": arguments.set, "actors": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
