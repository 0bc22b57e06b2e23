"""One run of the real controller in the simulated world, from a seed: its size, what goes wrong, and what must hold."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from actors.client.launch import concluded
from actors.controller import Controller
from actors.fleet import fleet, worker
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.learning.state import LearnerState
from solrl_ray.metrics.records import EventKind
from solrl_ray.records import WorkUnit
from solrl_ray.report.data import read_summary
from solrl_ray.storage import run_folder
from solrl_ray.storage.resume import check_prompts
from solrl_ray.storage.run_folder import RunFolder
from tests.simulated import virtual_clock
from tests.simulated.faults import Fault
from tests.simulated.memory_disk import MemoryDisk, PowerLoss
from tests.simulated.plans import Plan, Shape
from tests.simulated.players import players
from tests.simulated.promises import (
    Promises,
    check_budget,
    check_forgotten,
    check_requeued,
    check_result,
    check_rollbacks,
)
from tests.simulated.world import NOTICED, SimulatedWorld, damage_a_line

ROOT = Path(__file__).parents[2]
PROMPTS = Path(__file__).with_name("prompts")
PATIENCE = 2000.0
"""Virtual seconds in which a run with its faults must end: its deadlines are below."""
DEADLINES = (
    "{resources: 20, start: 21, explore: 15, regenerate: 16, update: 30, collective: 31, publish: 17, "
    "selector: 18, encode: 19, fetch: 14, checkpoint: 32}"
)
"""Longer than a slow call takes; short, as others are asked for a sign of life meanwhile. No two are equal, so that one
taken for another is seen."""
logging.getLogger("solrl_ray.prompts").setLevel(logging.ERROR)  # embeddings are torn by losses of power


EXPLAINED = [
    re.compile(sentence)
    for sentence in (
        r"^\S+ \(.+\) was refused from \S+ and from \S+: ",  # two workers agree
        r"^\S+ \(.+\) was refused from \S+, the only worker of its pool, which never gave a valid answer: ",
        r"^(explorer|regenerator)\S* cannot start$",  # and nobody of its pool has worked before
        r" found no room in the cluster within ",
        r"^encoding \d+ prompts? by encoder-0 |^the start of encoder-0 ",  # it has no successor
        r"No space left on device",
        r" passed its deadline of \S+ s$",  # a disk that hangs
    )
]
"""With which a run may end that must."""


@dataclass(slots=True)
class Ended:
    """What came of a run."""

    digests: tuple[str, ...] | None
    """Of selections and LoRA, and the numbers of the last state; None if it did not come to its end."""
    errors: list[str] = field(default_factory=list)
    """Sentences with which it ended before it was resumed."""
    happened: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """What was said to the user."""
    missed: tuple[Fault, ...] = ()
    """Faults that did not happen."""


@cache
def configuration(shape: Shape) -> Config:
    settings = (*shape.settings, "fleet.max_replacements=20", "fleet.strikes=2", f"fleet.deadlines={DEADLINES}")
    config = load([ROOT / "configs" / "demo.yaml"], settings)
    prompts = {name: str(PROMPTS / f"{name}.txt") for name in ("train", "heldout")}
    return _but(config, "prompts", **prompts)


def _but(config: Config, section: str, **values: Any) -> Config:
    """With other values in a section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def run(plan: Plan, *, lost: int | None = None) -> Ended:
    """Run it to its end, through its crashes. `lost`: seed of what a loss of power takes, if not the plan's."""
    base = configuration(plan.shape)
    explorers = base.fleet.explorers.model_copy(update={"count": plan.explorers})
    regenerators = base.fleet.regenerators.model_copy(update={"count": plan.regenerators})
    config = _but(base, "run", root="/", name="run")
    fleet = {"explorers": explorers, "regenerators": regenerators, "learners": base.fleet.learners}
    placement = "colocated" if plan.colocated else "split"
    config = _but(_but(config, "fleet", placement=placement, **fleet), "learner", world_size=plan.ranks)
    config = _but(config, "compile", learner=plan.compiled)
    disk, ended, promises = MemoryDisk(), Ended(None, missed=plan.faults), Promises()
    folder: Any = disk.path("/run")
    over = False
    for attempt, end in enumerate((*plan.ends, *[None] * (2 + len(plan.faults)))):
        faults = (*(fault for fault in ended.missed if fault not in plan.ends), *([end] if end else []))
        now = replace(plan, faults=faults, seed=plan.seed + attempt)
        try:
            over = _attempt(now, config, folder, promises, ended)
        except (
            RunError,
            UserError,
            OSError,
        ) as error:  # it must be one that these faults explain, and the run resumes after it
            ended.errors.append(str(error))
        if over:
            summary = read_summary(folder)
            last = check_result(RunFolder(folder), config)
            check_rollbacks(RunFolder(folder), config, promises.saved)
            ended.digests = summary.selection_digest, summary.lora_digest, *last
            break
        disk.lose_power(attempt + (plan.seed if lost is None else lost))
        if end and end.kind == "loses power and a block" and end not in ended.missed:
            _damage(folder, promises, random.Random(plan.seed))
    return ended


def _damage(path: Any, promises: Promises, chance: random.Random) -> None:
    """Let the newest checkpoint that can be read be damaged, if another one before it can, or a journal."""
    *before, newest = [None, None, *[each for each in RunFolder(path).checkpoints() if _is_whole(each[1])]]
    if newest is None or before[-1] is None or chance.random() < 0.5:
        damage_a_line(path.disk, chance)
    else:
        path.disk.damage(str(chance.choice(sorted(newest[1].iterdir()))), chance)
        promises.newest = before[-1][0]


def _is_whole(checkpoint: Path) -> bool:
    """Not one that was damaged before, or half removed."""
    try:
        LearnerState.load(checkpoint)
    except UserError:
        return False
    return True


def _attempt(plan: Plan, config: Config, path: Any, promises: Promises, ended: Ended) -> bool:
    """One driver's life. Returns whether the run came to its end; raises the error that ended it."""
    make, cards = players(config, path), plan.ranks if plan.colocated else 0
    world = SimulatedWorld(
        make, path.disk, seed=plan.seed, faults=plan.faults, nodes=plan.nodes, cards=cards, size=_size, config=config
    )
    world.promises = promises
    try:
        return virtual_clock.run(_driven(plan, config, path, world, ended.told))
    except PowerLoss:
        return False
    finally:
        ended.happened += world.happened
        ended.trace += world.trace
        ended.missed = world.faults.left


def _size(unit: WorkUnit) -> float:
    """Of a preview: its micro-batches, of 4; of others: prompts."""
    return len(unit.indices) / 4 if unit.stage == "explore" else 1.0 + len(unit.beside)


async def _driven(plan: Plan, config: Config, path: Any, world: SimulatedWorld, said: list[str]) -> bool:
    seconds, crash = config.fleet.deadlines.checkpoint, asyncio.ensure_future(world.crashed.wait())
    claim = asyncio.ensure_future(world.blocking(lambda: _claimed(path, config), "opening the run folder", seconds))
    await asyncio.wait([claim, crash], return_when=asyncio.FIRST_COMPLETED)
    if not claim.done() or claim.exception() or claim.result():
        crash.cancel()
        claim.cancel()
        await asyncio.wait([claim, crash])
        return not claim.cancelled() and claim.result()
    controller = Controller(config, path, world)  # type: ignore[arg-type]
    told = _listen(controller)
    others: list[asyncio.Task[None]] = []
    for call, pool, size in plan.scales:
        world.visits[call] = partial(_begin, others, partial(_scale, controller, pool, size))
    promised = world.promises.newest
    life = asyncio.ensure_future(controller.run())
    try:
        done, _ = await asyncio.wait([life, crash], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise AssertionError(f"the run has not ended after {PATIENCE:g} s: {_tasks()}")
        if controller._run is not None:
            begun = controller._run.point.updates
            assert begun >= promised, f"{promised} updates were saved, and it goes on after {begun}"
        if not world.crashed.is_set():
            if not life.cancelled():
                life.exception()  # is raised below
            _check_end(controller, world, told)
            _check_events(path, world, told)
            await life
            check_forgotten(controller, [actor.host.process for actor in world.actors])
            spoken = [text for _, text in told]
            check_budget(controller._run, world.affected, spoken, cards=plan.colocated)
            check_requeued(controller._run, spoken)
        return not world.crashed.is_set()
    finally:
        said += [text for _, text in told]
        if controller._run is not None:
            controller._run.folder.lock.release()
        await _clear_away(world, others)


def _claimed(path: Any, config: Config) -> bool:
    """Open the run folder as `actors.client.launch` does; whether nothing is left to do."""
    folder, resume = RunFolder(path), (path / "config.yaml").is_file()
    folder.create(config, resume=resume)
    try:
        over = resume and concluded(folder)
        if not over:
            check_prompts(folder, config)
        return over
    finally:
        folder.lock.release()


async def _clear_away(world: SimulatedWorld, others: list[asyncio.Task[None]]) -> None:
    """Raises what those beside the run have found wrong."""
    for actor in world.actors:
        world.kill(actor)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in others:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def _check_end(controller: Controller, world: SimulatedWorld, told: list[tuple[float, str]]) -> None:
    """Nobody and nothing is left behind, and each death was told once."""
    loop: Any = asyncio.get_running_loop()
    assert not loop.unseen, f"errors that nobody saw: {loop.unseen}"
    left = [name for name in _tasks() if not name.startswith(("the process of ", "beside: "))]
    assert not left, f"tasks left: {left}"
    pools = [actor for actor in world.actors if actor.role in ("explorer", "regenerator")]
    assert not any(actor.alive for actor in pools), f"workers left: {[actor.name for actor in pools if actor.alive]}"
    times = Counter(text.split()[0] for _, text in told if " was lost (" in text)
    assert not times or max(times.values()) == 1, f"told more than once: {times}"
    for actor in pools:
        if actor.died is not None and actor.died < world.now() - NOTICED:
            assert any(actor.name in text for _, text in told), f"nobody was told that {actor.name} died"


def _check_events(path: Any, world: SimulatedWorld, told: list[tuple[float, str]]) -> None:
    """The run folder has all that was told, however the run has ended."""
    held = [event.what for event in RunFolder(path).read_events()]
    if not any("disk" in what for what in world.happened):
        assert held[len(held) - len(told) :] == [text for _, text in told], f"events.jsonl ends with {held[-4:]}"


def _listen(controller: Controller) -> list[tuple[float, str]]:
    """When what is told to the user, from now on."""
    told: list[tuple[float, str]] = []
    telemetry = controller._telemetry
    say = telemetry.message

    def message(text: str, kind: EventKind = "note") -> None:
        told.append((asyncio.get_running_loop().time(), text))
        say(text, kind)

    telemetry.message = message  # type: ignore[method-assign]
    return told


def _begin(tasks: list[asyncio.Task[None]], work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """What others do beside the run."""
    tasks.append(asyncio.get_running_loop().create_task(work(), name=f"beside: {len(tasks)}"))


async def _scale(controller: Controller, pool: str, size: int) -> None:
    with suppress(RunError, UserError, OSError):  # it is told to whoever asks
        await controller.scale({pool: size})


def _tasks() -> list[str]:
    """Names of tasks that the run has begun and that have not ended."""
    return sorted(t.get_name() for t in asyncio.all_tasks() if not t.get_name().startswith("Task-"))


@cache
def undisturbed(shape: Shape) -> tuple[str, ...]:
    """Digests of a run of this shape to which nothing happens."""
    ended = run(Plan(0, shape, explorers=1, regenerators=1, ranks=1))
    assert ended.digests is not None, ended.errors
    return ended.digests


def violation(plan: Plan) -> str:
    """What did not hold in a run; empty if all did."""
    return judge(plan)[0]


def judge(plan: Plan) -> tuple[str, tuple[Fault, ...]]:
    """`violation`, and the faults that did not happen."""
    expected = undisturbed(plan.shape)
    try:
        ended = run(plan)
    except Exception as error:  # whatever it is: a bug of the code, or a promise that does not hold
        return f"{type(error).__name__}: {error}", ()
    said = ""
    if ended.digests != expected:
        said = f"digests {ended.digests} instead of {expected}; happened: {ended.happened}; errors: {ended.errors}"
    elif unexplained := [error for error in ended.errors if not any(each.search(error) for each in EXPLAINED)]:
        said = f"an unexpected end: {unexplained[0]}; happened: {ended.happened}"
    return said, ended.missed


run_folder.to_yaml = Config.model_dump_json  # which is YAML too; with comments and lines it takes a fourth of a run
worker.PING_SECONDS = fleet.NODES_SECONDS = 4.0  # instead of 2, which takes a tenth of a run
gc.freeze()  # what is imported is never garbage: runs take a fifth less
