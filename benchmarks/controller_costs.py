"""What a message costs the controller: real Ray, real selector and journal, and the real parts of a controller.
`scaling.py --calibrate` calls it."""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only

import orchestration
import ray
import torch

from actors.cluster import wait
from actors.cluster.rpc import Callee, send
from actors.dispatch.open_iteration import OpenIteration
from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.fleet.actor_factory import Actor, ActorClasses, ActorFactory
from actors.fleet.fleet import SHOW_SECONDS, Fleet
from actors.fleet.worker import Worker
from actors.monitoring.telemetry import Telemetry
from actors.ray_world import RayWorld
from actors.workers.selector import Ack, Opened, Selector
from actors.world import Sent, Tasks
from solrl_ray.records import Prompt, SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.dispatcher import HEDGE_LOOK, Dispatcher
from solrl_ray.scheduling.iteration_state import IterationPlan
from solrl_ray.scheduling.worker_state import State
from solrl_ray.simulator.scenario import Orchestration
from solrl_ray.simulator.simulation import Simulation
from solrl_ray.storage.run_folder import RunFolder

POOL, MICRO_BATCH, KEEP = 96, 24, 24
WORKS_OF_SELECTOR = ((40, 4), (160, MICRO_BATCH))
"""Prompts, and candidates a unit, of the iterations that the selector is measured with."""
LARGE = 2000
"""Prompts of an iteration that is only opened."""
TOGETHER = 32
"""Results, or groups, that are brought together; and units that are handed out together."""
ROUNDS = 60
"""How often units are."""
WORKERS = 1000
"""That the controller looks at."""
REPEATS = 200
SECONDS, ITERATIONS = 0.1, 12
"""Of the stages of real runs, and of which the first is not counted."""
WORKS = (orchestration.SHORT, orchestration.Work(16, 3))
"""Of those runs' iterations."""


class Prompted(Callee):
    """An explorer that answers at once."""

    def load_revision(self, payload: Any, probe: Any, full: bool) -> None:
        pass

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: Any) -> UnitResult:
        return _result(unit)


class Agreeing:
    """Instead of the selector and the way to it: whatever comes counts."""

    def __init__(self) -> None:
        self.left = 0
        """Results that are still to come."""
        self.all_came = asyncio.Event()

    def accept(self, result: UnitResult, acknowledged: Callable[[Ack], None]) -> None:
        acknowledged(Ack())
        self.left -= 1
        if not self.left:
            self.all_came.set()


class NotingWorld(RayWorld):
    """Knows which answers are waited for."""

    def __init__(self, factory: ActorFactory) -> None:
        super().__init__(factory)
        self.sent: list[Any] = []

    def send(self, actor: Any, method: str, *arguments: Any, parts: int = 1) -> Sent:
        sent = super().send(actor, method, *arguments, parts=parts)
        self.sent.append(sent.answer)
        return sent


def calibrate() -> None:
    """Print the lines of ``price_lists/controller.yaml``, milliseconds."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as root:
        selector = _selector(Path(root))
    with tempfile.TemporaryDirectory() as root:
        controller = asyncio.run(_controller(Path(root)))
    costs = _real(Orchestration(hop=selector["ask"] / 2, **selector, **controller))
    busy = os.getloadavg()[0]
    print(
        f'conditions: "median of {REPEATS} calls or so, Ray {ray.__version__}, Python {platform.python_version()}, '
        f'{os.cpu_count()} cores; load average, these calls included, {busy:.1f}"'
    )
    for name, seconds in costs.model_dump().items():
        print(f"{name}: {1000 * seconds:.4f}")


def _selector(folder: Path) -> dict[str, float]:
    """Seconds of a question that needs no work, of an iteration's opening for each unit, of what `accept` costs beyond
    a question for any number of results, of each result, of each reward in it, of each group, and of each group's file:
    medians, all but the first two out of `TOGETHER`.
    """
    selector = ray.remote(Selector).options(num_cpus=0).remote(folder)

    def told(method: str, *arguments: Any) -> Any:
        answer = send(selector, f"selector.{method}", method, *arguments)
        return wait.get(answer, what=method, seconds=60.0)

    full, alone, records = [], [], []
    for iteration, (prompts, micro_batch) in enumerate(WORKS_OF_SELECTOR):
        plan = _plan(iteration, prompts, micro_batch)
        told("open", plan)
        units = plan.pool_units()
        ones, some = _accepted(told, units[: len(units) // 2], 1)
        many, others = _accepted(told, units[len(units) // 2 :], TOGETHER)
        full += [*some, *others]
        alone.append(ones)
        records.append((many - ones) / (TOGETHER - 1))
    ask = _median(lambda: told("alive", "selector"))
    (_, small), (_, large) = WORKS_OF_SELECTOR
    candidate = max(0.0, (records[1] - records[0]) / (large - small))
    commit = max(0.0, alone[1] - ask - records[1])
    store, write = _grouped(told, full)
    return {
        "ask": ask,
        "open": max(0.0, _opened(told) - (ask + commit) / len(_plan(0, LARGE, MICRO_BATCH).pool_units())),
        "commit": commit,
        "record": max(0.0, records[1] - large * candidate),
        "candidate": candidate,
        "store": max(0.0, store - (ask + commit) / TOGETHER),
        "write": write,
    }


def _plan(iteration: int, prompts: int, micro_batch: int) -> IterationPlan:
    return IterationPlan(
        iteration=iteration,
        revision=iteration,
        prompt_ids=tuple(f"{number:016x}" for number in range(prompts)),
        pool=POOL,
        keep=KEEP,
        unit=micro_batch,
    )


def _opened(told: Callable[..., Any]) -> float:
    """Median seconds a unit, of many, until an iteration is open whose pools are asked for already."""
    seconds = []
    for iteration in range(100, 105):
        plan = _plan(iteration, LARGE, MICRO_BATCH)
        began = time.perf_counter()
        told("open", plan, True)
        seconds.append((time.perf_counter() - began) / (LARGE * POOL // MICRO_BATCH))
        told("drop", iteration)
    return statistics.median(seconds)


def _accepted(told: Callable[..., Any], units: list[WorkUnit], together: int) -> tuple[float, list[WorkUnit]]:
    """Median seconds to bring so many results at a time, and the regenerate units that came of them."""
    seconds, full = [], []
    for start in range(0, len(units) - together + 1, together):
        results = [_result(unit) for unit in units[start : start + together]]
        began = time.perf_counter()
        acks = told("accept", results)
        seconds.append(time.perf_counter() - began)
        full += [unit for ack in acks for unit in ack.units]
    return statistics.median(seconds), full


def _grouped(told: Callable[..., Any], full: list[WorkUnit]) -> tuple[float, float]:
    """Median seconds a group, `TOGETHER` at a time, until they are taken, every other time while those before are being
    written; and from there until they are written."""
    taken, written = [], []
    for start in range(0, len(full) - 2 * TOGETHER + 1, 2 * TOGETHER):
        pair = [_groups(full[first : first + TOGETHER]) for first in (start, start + TOGETHER)]
        began = time.perf_counter()
        for groups in pair:
            told("accept_groups", *groups)
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


async def _controller(root: Path) -> dict[str, float]:
    """Seconds of the controller's own work for each message, and for each worker that it looks at: CPU time of its
    thread, in which it does nothing else. Wall time would count who else wants this machine's cores."""
    config = orchestration.sleeping_config(1, SECONDS, 1, root)
    folder = RunFolder(root)
    world = NotingWorld(
        ActorFactory(config, root, ActorClasses(text_encoder=orchestration.SleepingEncoder), scope="controller-costs")
    )
    actor = Actor(ray.remote(Prompted).options(num_cpus=0).remote(), "explorer")
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(Tasks())
        telemetry = Telemetry(config, folder, world)
        await telemetry.resume([], [])
        tasks.start(telemetry.keep_writing(), "writing spans")
        fleet = Fleet(config, world, tasks, telemetry)
        pool = fleet.explorers["explorers"]
        for number in range(WORKERS):
            name = f"explorer-{number}"
            pool.workers[name] = Worker(
                name,
                "explorers",
                actor,
                world=world,
                deadlines=config.fleet.deadlines,
                unit_seconds=600.0,
                weights=lambda: None,
                alone=lambda: False,
                unplaced=lambda worker, seconds, since: None,
                observer=fleet,
                hand_out=fleet.hand_out,
            )
            pool.workers[name].state = State.READY
        some = list(pool.workers.values())[:TOGETHER]
        costs = {
            "queue": _queued(fleet, world, tasks),
            "embed": await _embedded(PromptEmbeddings(config, folder.embeddings, world, tasks), world),
            "worker": _looking(fleet) / WORKERS,
            "load": await _loading(some, world),
        }
        for worker in some:
            await stack.enter_async_context(worker._answers)
            fleet.hand_out.ready(worker, ("old", 0))
        return costs | await _handed_out(fleet, world, tasks)


def _prompts(plan: IterationPlan) -> list[Prompt]:
    text = "an astronaut on a horse on the moon, in the style of a woodcut"
    return [Prompt(id=prompt_id, text=text) for prompt_id in plan.prompt_ids]


def _iteration(
    plan: IterationPlan,
    opened: Opened | None,
    agreeing: Agreeing,
    fleet: Fleet,
    world: NotingWorld,
    tasks: Tasks,
) -> OpenIteration:
    return OpenIteration(
        plan,
        _prompts(plan),
        dict.fromkeys(plan.prompt_ids, world.put(torch.zeros(8))),
        opened,
        world=world,
        tasks=tasks,
        hand_out=fleet.hand_out,
        selector=agreeing,  # type: ignore[arg-type]
        publication=dict,
        tell=lambda _: None,
        changed=lambda: None,  # it shows five times a second, whatever is answered
    )


def _queued(fleet: Fleet, world: NotingWorld, tasks: Tasks) -> float:
    """Median seconds a unit, of many, until an iteration's pools wait for workers that hold its revision."""
    seconds = []
    for number in range(100, 105):
        began = time.thread_time()
        this = _iteration(_plan(number, LARGE, MICRO_BATCH), None, Agreeing(), fleet, world, tasks)
        seconds.append((time.thread_time() - began) / (LARGE * POOL // MICRO_BATCH))
        this.learned()
    return statistics.median(seconds)


async def _embedded(embeddings: PromptEmbeddings, world: NotingWorld) -> float:
    """Seconds a prompt, of many, to ask for its embedding, to keep the answer and to refer to it."""
    prompts = _prompts(_plan(0, LARGE, MICRO_BATCH))
    embeddings.join("encoder-0", world.text_encoder("encoder-0"))
    await embeddings.await_encoder()
    began = time.thread_time()
    await embeddings.of(prompts)
    return (time.thread_time() - began) / len(prompts)


async def _handed_out(fleet: Fleet, world: NotingWorld, tasks: Tasks) -> dict[str, float]:
    """Median seconds a unit: to choose who does it and send it; and to take its answer, which is there."""
    plan = _plan(0, TOGETHER * ROUNDS * MICRO_BATCH // POOL, MICRO_BATCH)
    agreeing = Agreeing()
    nothing = Opened(groups=(), candidates=0, units=())
    this = _iteration(plan, nothing, agreeing, fleet, world, tasks)
    units, calls, answers = plan.pool_units(), [], []
    for start in range(0, len(units), TOGETHER):
        this._want(units[start : start + TOGETHER])
        world.sent.clear()
        agreeing.left = TOGETHER
        agreeing.all_came.clear()
        began = time.thread_time()
        fleet.hand_out._assign()
        calls.append((time.thread_time() - began) / TOGETHER)
        ray.wait(world.sent, num_returns=TOGETHER, timeout=60.0)
        began = time.thread_time()
        await agreeing.all_came.wait()
        answers.append((time.thread_time() - began) / TOGETHER)
    return {"call": statistics.median(calls), "answer": statistics.median(answers)}


async def _loading(workers: list[Worker], world: NotingWorld) -> float:
    """Median seconds to send a worker a revision, many at a time."""
    payload, probe, seconds = world.put(torch.zeros(8)), world.put(torch.zeros(8)), []
    for _ in range(ROUNDS):
        calls = [
            worker._call("load_revision", payload, probe, False, what="loading", seconds=600.0) for worker in workers
        ]
        began = time.thread_time()
        loads = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)  # each of them is sent
        seconds.append((time.thread_time() - began) / len(workers))
        await asyncio.gather(*loads)
    return statistics.median(seconds)


def _looking(fleet: Fleet) -> float:
    """Seconds of a look at all workers, with two units in the hands of each, and its share of one for late units."""
    dispatcher = Dispatcher(max_inflight=2, hedge=3.0, strikes=3)
    dispatcher.add([_unit(n, start) for n in range(WORKERS) for start in (0, MICRO_BATCH)], batch="", pool="explorers")
    for name in fleet.explorers["explorers"].workers:
        dispatcher.ready(name, "explorers", ("old", 0))
    dispatcher.assign(0.0)
    own, fleet.hand_out._dispatcher = fleet.hand_out._dispatcher, dispatcher
    shown = _median(fleet._show, 20, time.thread_time)
    fleet.hand_out._dispatcher = own
    return shown + _median(lambda: dispatcher._hedges(1.0), 20, time.thread_time) * SHOW_SECONDS / HEDGE_LOOK


def _unit(prompt: int = 0, start: int = 0) -> WorkUnit:
    indices = tuple(range(start, start + MICRO_BATCH))
    return WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=f"{prompt:016x}", indices=indices)


def _result(unit: WorkUnit) -> UnitResult:
    return UnitResult(unit=unit, rewards=tuple(map(float, unit.indices)), worker="w", score_class="c", seconds=1.0)


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
    return costs.model_copy(update={"gap": gap, "iteration": max(0.0, unexplained[0] - units[0] * gap)})


def _median(
    call: Callable[[], object], repeats: int = REPEATS, clock: Callable[[], float] = time.perf_counter
) -> float:
    times = []
    for _ in range(repeats):
        began = clock()
        call()
        times.append(clock() - began)
    return statistics.median(times)
