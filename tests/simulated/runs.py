"""One run of the real controller in the simulated world, from a seed: its size, what goes wrong, and what must hold."""

from __future__ import annotations

import asyncio
import atexit
import random
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from actors.controller import Controller
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.report.summary import read_summary
from solrl_ray.simulator import virtual_clock
from solrl_ray.simulator.world import Fault, SimulatedWorld
from solrl_ray.storage.run_folder import RunFolder
from tests.simulated.players import players

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
PATIENCE = 4000.0
"""Virtual seconds in which a run with its faults must end: every deadline below is shorter."""
ROLES = ("explorer", "regenerator", "selector", "learner", "text_encoder")
KINDS = {
    "explorer": (
        "dies before",
        "dies after",
        "hangs",
        "is slow",
        "answers NaN",
        "answers another unit",
        "cannot start",
        "is never placed",
        "lost its samples",
    ),
    "regenerator": (
        "dies before",
        "dies after",
        "hangs",
        "is slow",
        "cannot start",
        "is never placed",
        "lost its samples",
    ),
    "selector": ("dies before", "dies after", "hangs", "is slow"),
    "learner": ("dies before", "dies after", "hangs", "is slow"),
    "text_encoder": ("is slow",),
}


EXPLAINED = [
    re.compile(sentence)
    for sentence in (
        r"^\S+ was refused from \S+ and from \S+: ",  # two workers agree
        r"^\S+ was refused from \S+, which is alone and was never right: ",
        r"^(explorer|regenerator)-\S+ cannot start$",  # and nobody of its pool has worked before
        r" found no room in the cluster within ",
    )
]
"""With which a run may end that must."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a run, on which its result depends, and those on which it does not."""

    iterations: int
    prompts: int
    units: int
    staleness: int
    audits: int
    every: int
    strategy: str

    @property
    def settings(self) -> tuple[str, ...]:
        one_stage = self.strategy != "two_stage"
        pool, keep = 4 * self.units, 4
        return (
            f"run.iterations={self.iterations}",
            f"rollout={{prompts: {self.prompts}, pool: {pool}, keep: {keep}, strategy: {self.strategy}, "
            f"max_staleness: {0 if one_stage else self.staleness}}}",
            "rollout.explore={steps: 3, micro_batch: 4}",
            "rollout.regenerate={steps: 4, micro_batch: 4}",
            f"fidelity.audit_prompts={0 if one_stage else self.audits}",
            "fidelity.audit_seeds=2",
            f"evaluation={{every: {self.every}, prompts: 2, samples: 2, pictures: 0, reference: ''}}",
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a seed decides."""

    seed: int
    shape: Shape
    explorers: int
    regenerators: int
    ranks: int
    faults: tuple[Fault, ...] = ()
    crashes: tuple[int, ...] = ()
    """Numbers of the calls with whose sending the controller dies; the next one resumes."""

    @classmethod
    def of(cls, seed: int) -> Plan:
        rng = random.Random(seed)
        shape = Shape(
            iterations=rng.choice([2, 3]),
            prompts=rng.choice([1, 2, 3]),
            units=rng.choice([2, 3]),
            staleness=rng.choice([0, 0, 1]),
            audits=rng.choice([0, 0, 1]),
            every=rng.choice([0, 0, 1]),
            strategy=rng.choice(["two_stage", "two_stage", "two_stage", "scaled"]),
        )
        faults = []
        for _ in range(rng.choice([0, 1, 1, 2, 3, 4])):
            role = rng.choice(ROLES)
            faults.append(Fault(role, rng.randint(1, 40), rng.choice(KINDS[role])))
        crashes = tuple(rng.randint(1, 150) for _ in range(rng.choice([0, 0, 0, 1, 2])))
        return cls(seed, shape, rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([1, 2]), tuple(faults), crashes)

    def calm(self) -> Plan:
        """The same result, undisturbed."""
        return Plan(0, self.shape, 1, 1, 1)


@dataclass(slots=True)
class Ended:
    """What came of a run."""

    digests: tuple[str, str] | None
    """Of selections and LoRA; None if it did not come to its end."""
    errors: list[str] = field(default_factory=list)
    """Sentences with which it ended before it was resumed."""
    happened: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


@cache
def configuration(shape: Shape) -> Config:
    settings = (*shape.settings, "fleet.max_replacements=20", "fleet.strikes=2")
    config = load([ROOT / "configs" / "demo.yaml"], settings)
    folder = Path(tempfile.mkdtemp(prefix="prompts-", dir=memory()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, count in (("train", 12), ("heldout", 2)):
        (folder / f"{name}.txt").write_text("".join(f"{name} prompt {number}\n" for number in range(count)))
    prompts = config.prompts.model_copy(
        update={"train": str(folder / "train.txt"), "heldout": str(folder / "heldout.txt")}
    )
    return config.model_copy(update={"prompts": prompts})


def memory() -> Path | None:
    """Where files cost no disk, if this machine has such a place."""
    return MEMORY if MEMORY.is_dir() else None


def run(plan: Plan) -> Ended:
    """Run it to its end, through its crashes."""
    root = Path(tempfile.mkdtemp(prefix="simulated-", dir=memory()))
    try:
        return _run(plan, root)
    finally:
        shutil.rmtree(root)


def _run(plan: Plan, root: Path) -> Ended:
    base = configuration(plan.shape)
    fleet = base.fleet.model_copy(
        update={
            "explorers": base.fleet.explorers.model_copy(update={"count": plan.explorers}),
            "regenerators": base.fleet.regenerators.model_copy(update={"count": plan.regenerators}),
        }
    )
    config = base.model_copy(
        update={
            "run": base.run.model_copy(update={"root": str(root), "name": "run"}),
            "fleet": fleet,
            "learner": base.learner.model_copy(update={"world_size": plan.ranks}),
        }
    )
    folder = RunFolder.of(config)
    folder.path.mkdir()
    ended = Ended(None)
    for attempt, crash in enumerate((*plan.crashes, None, None)):
        faults = plan.faults if attempt == 0 else ()
        world = SimulatedWorld(players(config, folder.path), seed=plan.seed + attempt, faults=faults, crash_at=crash)
        try:
            crashed = virtual_clock.run(_controlled(config, folder.path, world))
        except RunError as error:  # it must be one that these faults explain, and the run resumes after it
            ended.errors.append(str(error))
            crashed = True
        ended.happened += world.happened
        ended.trace += world.trace
        if not crashed:
            break
    if not crashed:
        summary = read_summary(folder.path)
        ended.digests = summary.selection_digest, summary.lora_digest
    return ended


async def _controlled(config: Config, folder: Path, world: SimulatedWorld) -> bool:
    """Whether the controller died before the run ended. Raises what ended it."""
    controller = Controller(config, folder, world)  # type: ignore[arg-type]
    life = asyncio.ensure_future(controller.run())
    crash = asyncio.ensure_future(world.crashed.wait())
    try:
        done, _ = await asyncio.wait([life, crash], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise AssertionError(f"the run has not ended after {PATIENCE:g} s: {_tasks()}")
        if life in done:
            left = [name for name in _tasks() if not name.startswith("the process of ")]
            assert not left, f"tasks left: {left}"
            pools = [actor.name for actor in world.actors if actor.alive and actor.role in ("explorer", "regenerator")]
            assert not pools, f"workers left: {pools}"
            await life
        return life not in done
    finally:
        controller._parts.folder.unlock()
        for actor in world.actors:
            world.kill(actor)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _tasks() -> list[str]:
    """Names of tasks that the run has begun and that have not ended."""
    return sorted(t.get_name() for t in asyncio.all_tasks() if not t.get_name().startswith("Task-"))


@cache
def undisturbed(shape: Shape) -> tuple[str, str]:
    """Digests of a run of this shape to which nothing happens."""
    ended = run(Plan(0, shape, 1, 1, 1))
    assert ended.digests is not None, ended.errors
    return ended.digests


def violation(plan: Plan) -> str:
    """What did not hold in a run; empty if all did."""
    expected = undisturbed(plan.shape)
    try:
        ended = run(plan)
    except Exception as error:  # whatever it is: a bug of the code, or a promise that does not hold
        return f"{type(error).__name__}: {error}"
    if ended.digests != expected:
        return f"digests {ended.digests} instead of {expected}; happened: {ended.happened}; errors: {ended.errors}"
    for error in ended.errors:
        if not any(each.search(error) for each in EXPLAINED):
            return f"an unexpected end: {error}; happened: {ended.happened}"
    return ""
