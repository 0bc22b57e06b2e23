"""What a message costs the controller: real Ray, real selector and journal. `scaling.py --calibrate` calls it."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only

import ray
import torch

from actors import waiting
from actors.selector import Selector
from solrl_ray.records import SampleGroup, UnitResult
from solrl_ray.scheduling.book import IterationPlan

PROMPTS, POOL, MICRO_BATCH, KEEP = 40, 96, 24, 24
PENDING = (20, 2000)
REPEATS = 200


class Sleeper:
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def calibrate() -> None:
    """Print the lines of ``price_lists/controller.yaml``; `iteration` is not among them, see docs/scaling.md."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as root:
        ask, fold, store = _selector(Path(root))
    call, wait = _waiting()
    per_worker = 2 * (wait[PENDING[1]] - wait[PENDING[0]]) / (PENDING[1] - PENDING[0])
    load = os.getloadavg()[0]
    print(
        f'conditions: "median of {REPEATS} calls or so, Ray {ray.__version__}, Python {platform.python_version()}, '
        f'{os.cpu_count()} cores at a load of {load:.1f}"'
    )
    for name, seconds in (
        ("round", wait[PENDING[0]]),
        ("worker", per_worker),
        ("call", call),
        ("ask", ask),
        ("fold", max(0.0, fold - ask)),
        ("store", max(0.0, store - ask)),
        ("hop", ask / 2),
    ):
        print(f"{name}: {1000 * seconds:.4f}")


def _selector(folder: Path) -> tuple[float, float, float]:
    """Median seconds of a question that needs no work, of a fold and of a store."""
    plan = IterationPlan(
        iteration=0,
        revision=0,
        prompt_ids=tuple(f"{number:016x}" for number in range(PROMPTS)),
        pool=POOL,
        keep=KEEP,
        micro_batch=MICRO_BATCH,
    )
    selector = ray.remote(Selector).options(num_cpus=0).remote(folder)

    def told(method: str, *arguments: object) -> object:
        return waiting.get(getattr(selector, method).remote(*arguments), what=method, seconds=60.0)

    told("open", plan)
    ask = _median(lambda: told("lease", 0, "regenerate", []))
    folds, full = [], []
    for unit in plan.pool_units():
        rewards = tuple(float(index) for index in unit.indices)
        result = UnitResult(unit=unit, rewards=rewards, worker="w", score_class="c", seconds=1.0)
        began = time.perf_counter()
        made = told("fold", result)
        folds.append(time.perf_counter() - began)
        if made is not None:
            full.append(made)
    stores = []
    for unit in full:
        group = ray.put(
            SampleGroup(
                iteration=0,
                revision=0,
                prompt_id=unit.prompt_id,
                indices=unit.indices,
                rewards=tuple(float(index) for index in unit.indices),
                latents=torch.zeros(len(unit.indices), 64, 16),
            )
        )
        began = time.perf_counter()
        told("store", group)
        stores.append(time.perf_counter() - began)
    return ask, statistics.median(folds), statistics.median(stores)


def _waiting() -> tuple[float, dict[int, float]]:
    """Median seconds to send a call, and to find the one ready reference among so many pending ones."""
    sleeper = ray.remote(Sleeper).options(num_cpus=0).remote()
    ready = ray.put(0)
    began = time.perf_counter()
    pending = [sleeper.sleep.remote(600.0) for _ in range(PENDING[-1])]
    call = (time.perf_counter() - began) / len(pending)
    waits = {n: _median(lambda n=n: waiting.first_ready([*pending[:n], ready], seconds=1.0), 50) for n in PENDING}
    ray.kill(sleeper)
    return call, waits


def _median(call: Callable[[], object], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
