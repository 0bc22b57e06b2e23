"""What a message costs the controller: real Ray, real selector and journal. `scaling.py --calibrate` calls it."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only

import orchestration
import ray
import torch

from actors.cluster import wait
from actors.cluster.rpc import Callee, send
from actors.fleet.budget import Budget
from actors.fleet.member import Member
from actors.fleet.pool import Pool
from actors.workers.selector import Selector
from solrl_ray.config.schema import Deadlines
from solrl_ray.records import Prompt, SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.hedging import Hedging
from solrl_ray.scheduling.iteration_state import IterationPlan
from solrl_ray.scheduling.worker_state import State
from solrl_ray.simulator.scenario import Orchestration
from solrl_ray.simulator.simulation import Simulation

POOL, MICRO_BATCH, KEEP = 96, 24, 24
WORKS_OF_SELECTOR = ((40, 4), (160, MICRO_BATCH))
"""Prompts, and candidates a unit, of the iterations that the selector is measured with."""
TOGETHER = 32
"""Results, or groups, that are brought together."""
PENDING = (20, 2000)
REPEATS = 200
SECONDS, ITERATIONS = 0.1, 12
"""Of the stages of real runs, and of which the first is not counted."""
WORKS = (orchestration.SHORT, orchestration.Work(16, 3))
"""Of those runs' iterations."""


class Sleeper(Callee):
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def load_revision(self, payload: Any, probe: Any, full: bool) -> None:
        pass

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: Any) -> None:
        time.sleep(600.0)

    def answer(self, unit: WorkUnit) -> UnitResult:
        return _result(unit)


def calibrate() -> None:
    """Print the lines of ``price_lists/controller.yaml``, milliseconds."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as root:
        selector = _selector(Path(root))
    wait = _waiting()
    first, answer = _answers()
    call, load = _sending()
    costs = Orchestration(
        round=wait[PENDING[0]] + first,
        worker=2 * (wait[PENDING[1]] - wait[PENDING[0]]) / (PENDING[1] - PENDING[0]) + _looking(),
        call=call,
        load=load,
        answer=answer,
        hop=selector["ask"] / 2,
        **selector,
    )
    costs = _real(costs)
    load = os.getloadavg()[0]
    print(
        f'conditions: "median of {REPEATS} calls or so, Ray {ray.__version__}, Python {platform.python_version()}, '
        f'{os.cpu_count()} cores at a load of {load:.1f}"'
    )
    for name, seconds in asdict(costs).items():
        print(f"{name}: {1000 * seconds:.4f}")


def _selector(folder: Path) -> dict[str, float]:
    """Seconds of a question that needs no work, of what `take` costs beyond it for any number of results, of each
    result, of each reward in it, of each group, and of each group's file: medians, all but the first out of `TOGETHER`.
    """
    selector = ray.remote(Selector).options(num_cpus=0).remote(folder)

    def told(method: str, *arguments: Any) -> Any:
        return wait.get(send(selector, method, *arguments), what=method, seconds=60.0)

    full, alone, records = [], [], []
    for iteration, (prompts, micro_batch) in enumerate(WORKS_OF_SELECTOR):
        plan = IterationPlan(
            iteration=iteration,
            revision=iteration,
            prompt_ids=tuple(f"{number:016x}" for number in range(prompts)),
            pool=POOL,
            keep=KEEP,
            micro_batch=micro_batch,
        )
        told("open", plan)
        units = plan.pool_units()
        ones, some = _taken(told, units[: len(units) // 2], 1)
        many, others = _taken(told, units[len(units) // 2 :], TOGETHER)
        full += [*some, *others]
        alone.append(ones)
        records.append((many - ones) / (TOGETHER - 1))
    ask = _median(lambda: told("lease", 0, "regenerate", []))
    (_, small), (_, large) = WORKS_OF_SELECTOR
    candidate = max(0.0, (records[1] - records[0]) / (large - small))
    commit = max(0.0, alone[1] - ask - records[1])
    store, write = _grouped(told, full)
    return {
        "ask": ask,
        "commit": commit,
        "record": max(0.0, records[1] - large * candidate),
        "candidate": candidate,
        "store": max(0.0, store - (ask + commit) / TOGETHER),
        "write": write,
    }


def _taken(told: Callable[..., Any], units: list[WorkUnit], together: int) -> tuple[float, list[WorkUnit]]:
    """Median seconds to bring so many results at a time, and the regenerate units that came of them."""
    seconds, full = [], []
    for start in range(0, len(units) - together + 1, together):
        results = [_result(unit) for unit in units[start : start + together]]
        began = time.perf_counter()
        answers = told("take", results)
        seconds.append(time.perf_counter() - began)
        full += [answer.regenerate for answer in answers if answer.regenerate is not None]
    return statistics.median(seconds), full


def _grouped(told: Callable[..., Any], full: list[WorkUnit]) -> tuple[float, float]:
    """Median seconds a group, `TOGETHER` at a time, until they are taken, every other time while those before are being
    written; and from there until they are written."""
    taken, written = [], []
    for start in range(0, len(full) - 2 * TOGETHER + 1, 2 * TOGETHER):
        pair = [_groups(full[first : first + TOGETHER]) for first in (start, start + TOGETHER)]
        began = time.perf_counter()
        for groups in pair:
            told("take_groups", *groups)
        taken.append((time.perf_counter() - began) / (2 * TOGETHER))
        last = full[start + 2 * TOGETHER - 1]
        told("stored", last.iteration, last.prompt_id)  # waits for all of them
        written.append((time.perf_counter() - began) / (2 * TOGETHER))
    return statistics.median(taken), statistics.median(written)


def _groups(full: list[WorkUnit]) -> list[Any]:
    return [
        ray.put(
            SampleGroup(
                iteration=unit.iteration,
                revision=unit.revision,
                prompt_id=unit.prompt_id,
                indices=unit.indices,
                rewards=tuple(map(float, unit.indices)),
                latents=torch.zeros(len(unit.indices), 64, 16),
            )
        )
        for unit in full
    ]


def _answers() -> tuple[float, float]:
    """Median seconds to take results that are there: for any number of them, and for each out of `TOGETHER`."""
    sleeper = ray.remote(Sleeper).options(num_cpus=0).remote()
    seconds = {}
    for count in (1, TOGETHER):
        groups = [[send(sleeper, "answer", _unit()) for _ in range(count)] for _ in range(50)]
        ray.wait(groups[-1], num_returns=count, timeout=60.0)
        answered = iter(groups)
        seconds[count] = _median(lambda found=answered: wait.get_together(next(found), seconds=60.0), len(groups))
    ray.kill(sleeper)
    each = (seconds[TOGETHER] - seconds[1]) / (TOGETHER - 1)
    return seconds[1] - each, each


def _waiting() -> dict[int, float]:
    """Seconds to find the one ready reference among so many pending ones."""
    sleeper = ray.remote(Sleeper).options(num_cpus=0).remote()
    ready = ray.put(0)
    pending = [sleeper.sleep.remote(600.0) for _ in range(PENDING[-1])]
    waits = {n: _median(lambda n=n: wait.first_ready([*pending[:n], ready], seconds=1.0), 50) for n in PENDING}
    ray.kill(sleeper)
    return waits


def _sending() -> tuple[float, float]:
    """Median seconds to send a worker a unit, and a revision."""
    sleeper = ray.remote(Sleeper).options(num_cpus=0).remote()
    wait.get(sleeper.sleep.remote(0.0), what="a start", seconds=60.0)  # to who has started, as in a run
    embedding = ray.put(torch.zeros(8))
    unit = _unit()
    prompt = Prompt(id=unit.prompt_id, text="an astronaut on a horse on the moon, in the style of a woodcut")
    payload, pool = ray.put(torch.zeros(8)), _pool(1, handle=sleeper)
    load = _median(
        lambda: pool.publish("0", lambda handle, full: handle.load_revision.remote(payload, embedding, full))
    )
    pool = _pool(1, handle=sleeper)
    call = _median(lambda: pool.give("explorer-0", unit, "explore", unit, prompt, embedding))
    ray.kill(sleeper)
    return call, load


def _looking(workers: int = 1000) -> float:
    """Seconds that a pool spends on each of its workers, two units in the hands of each, in one turn of the loop."""
    pool = _pool(workers)
    for number in range(workers):
        for start in (0, MICRO_BATCH):
            unit = _unit(number, start)
            member = pool._members[f"explorer-{number}"]
            pool._call(member, unit, "unit", 600.0, unit=unit)
    hedging = Hedging(3.0)

    def turn() -> None:
        pool.refs()
        pool.settle(set())
        pool.slots()
        hedging.pairs(pool.roll.idle(), pool.roll.out())

    return _median(turn, 20) / workers


def _unit(prompt: int = 0, start: int = 0) -> WorkUnit:
    indices = tuple(range(start, start + MICRO_BATCH))
    return WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=f"{prompt:016x}", indices=indices)


def _result(unit: WorkUnit) -> UnitResult:
    return UnitResult(unit=unit, rewards=tuple(map(float, unit.indices)), worker="w", score_class="c", seconds=1.0)


def _pool(workers: int, handle: Any = None) -> Pool:
    pool = Pool(lambda _: None, unit_seconds=600.0, max_inflight=2, deadlines=Deadlines(), budget=Budget(0))
    for number in range(workers):
        name = f"explorer-{number}"
        pool._members[name] = Member(name, handle, opened=0.0, state=State.READY)
    return pool


def _real(costs: Orchestration) -> Orchestration:
    """With what the other costs do not explain of real iterations with one explorer and short stages: of each unit, and
    of the whole."""
    units, unexplained = [], []
    for work in WORKS:
        with tempfile.TemporaryDirectory() as root:
            measured = orchestration.measure(1, SECONDS, ITERATIONS, Path(root), work)["measured_seconds"]
        simulated = Simulation(orchestration.scenario(1, SECONDS, costs, work))
        units.append(work.prompts * work.units)
        unexplained.append(measured - statistics.fmean(iteration.seconds for iteration in simulated.run(2)))
    gap = max(0.0, (unexplained[1] - unexplained[0]) / (units[1] - units[0]))
    return replace(costs, gap=gap, iteration=max(0.0, unexplained[0] - units[0] * gap))


def _median(call: Callable[[], object], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
