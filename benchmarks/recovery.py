"""What does a death cost? A killed explorer, beside an undisturbed run; a killed learner rank, until its group is back.

    PYTHONPATH=. python benchmarks/recovery.py

1. Stages that sleep (`orchestration.py`), so that nothing competes for this machine's cores: an explorer is killed in
   the middle of a unit in every second iteration. The cost is the median of those iterations less that of the others.
2. The testbed with two explorers and a learner of two ranks: in one iteration an explorer is killed in a unit, in
   another one a rank after its first backward pass. How long until the replacement is ready, and the group at the last
   state again, is what the workers note. A replacement starts with importing PyTorch, so what this costs depends on
   how many cores are free.

Nobody else should work on the machine meanwhile.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only
os.environ.setdefault("OMP_NUM_THREADS", "1")

import orchestration as sleeping
import ray

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from solrl_ray.config.schema import Config
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit
from tests.chaos.notes import Reader
from tests.chaos.noting import NotingExplorer, NotingLearner
from tests.support.small import digests, small_config

RESULTS = Path(__file__).parent / "results" / "recovery.json"
EXPLORERS, STAGE, ITERATIONS = 4, 2.0, 7
ALLOWED_EXPLORER = STAGE + 2.0
ALLOWED_LEARNER = 15.0


def first_time(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KilledWhileSleeping(sleeping.SleepingExplorer):
    """Half-way through a unit of each odd iteration, one of them."""

    def __init__(self, name: str, config: Config) -> None:
        super().__init__(name, config)
        self._root = Path(config.run.root)

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        if unit.iteration % 2 and first_time(self._root / f"killed-{unit.iteration}"):
            time.sleep(self._seconds / 2)
            die()
        return super().explore(unit, prompt, embedding)


def lost_explorer(root: Path) -> dict[str, Any]:
    """Seconds of iterations with and without a death; the first iteration, which starts everything, is left out."""
    config = sleeping.sleeping_config(EXPLORERS, STAGE, ITERATIONS, root)
    launch.train(config, live=False, classes=sleeping.sleeping_classes(KilledWhileSleeping))
    records = map(json.loads, (root / config.run.name / "metrics.jsonl").read_text().splitlines())
    totals = {r["iteration"]: r["seconds"]["total"] for r in records if r["event"] == "iteration"}
    hurt = [totals[i] for i in range(1, ITERATIONS, 2)]
    calm = [totals[i] for i in range(2, ITERATIONS, 2)]
    return {
        "undisturbed": round(statistics.median(calm), 2),
        "with_a_death": round(statistics.median(hurt), 2),
        "extra": round(statistics.median(hurt) - statistics.median(calm), 2),
        "extra_max": round(max(hurt) - statistics.median(calm), 2),
        "allowed": ALLOWED_EXPLORER,
        "deaths": len(hurt),
    }


class KilledExplorer(NotingExplorer):
    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        result = super().explore(unit, prompt, embedding)
        if unit.iteration == 1 and first_time(Path(self._config.run.root) / "explorer"):
            self._note("dying")
            die()
        return result


class KilledLearner(NotingLearner):
    """Rank 1, after its first backward pass of update 3."""

    def update(self, iteration: int) -> UpdateMetrics:
        if iteration == 3 and self._rank == 1:
            engine = self._joined._engine
            backward = engine.backward

            def killed(*arguments: Any, **keywords: Any) -> None:
                backward(*arguments, **keywords)
                if first_time(Path(self._config.run.root) / "learner"):
                    self._note("dying")
                    die()

            engine.backward = killed  # type: ignore[method-assign]
        return super().update(iteration)


def real(root: Path, name: str, roles: ActorClasses) -> Config:
    config = small_config(root, name, "run.iterations=5", "fleet.explorers.count=2", "learner.world_size=2")
    launch.train(config, live=False, classes=roles)
    return config


def lost_workers(root: Path) -> dict[str, Any]:
    """Seconds from each death until its place is taken, from what the workers noted."""
    calm = real(root / "calm", "calm", ActorClasses())
    hurt = real(root / "hurt", "hurt", ActorClasses(explorer=KilledExplorer, learner=KilledLearner))
    reader = Reader(root / "hurt" / "notes.jsonl")
    reader.read()
    found: dict[str, Any] = {"same_digests": digests(calm) == digests(hurt)}
    for role, whole in (("explorer", "ready"), ("learner", "loaded")):
        death = next(note for note in reader.notes if note.doing == "dying" and note.who.startswith(role))
        new = (n for n in reader.notes if n.at > death.at and n.slot == death.slot and n.pid != death.pid)
        found[role] = round(next(n.at for n in new if n.doing == whole) - death.at, 2)
    return found


def main() -> None:
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as root:
        explorer = lost_explorer(Path(root))
        workers = lost_workers(Path(root))
    conditions = {
        "explorers": EXPLORERS,
        "stage_seconds": STAGE,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "ray": ray.__version__,
    }
    print(f"iteration of stages of {STAGE:g} s, {EXPLORERS} explorers: {explorer['undisturbed']} s undisturbed,")
    print(f"  {explorer['with_a_death']} s with a death: {explorer['extra']} s more (at most {ALLOWED_EXPLORER:g} s)")
    print(f"testbed: a killed explorer's replacement is ready after {workers['explorer']} s, the group of a killed")
    print(f"  learner rank at its last state after {workers['learner']} s (at most {ALLOWED_LEARNER:g} s)")
    print(f"  digests beside the undisturbed run: {'the same' if workers['same_digests'] else 'DIFFERENT'}")
    content = {"conditions": conditions, "sleeping_stages": explorer, "testbed_seconds_until_whole": workers}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
