"""A soak: a run whose processes and nodes are killed at random for minutes ends with the bytes of an undisturbed one.

    python -m tests.chaos.soak --seconds 900 --seed 1

Real workers on a Ray cluster of several raylets on this machine. Every few seconds somebody is chosen by the seed and
killed in a state that is chosen, too; the driver is resumed whenever it has ended. After `--seconds` the run is left in
peace for two more iterations, and then its twin makes the same number of iterations undisturbed. Prints what was
survived and how long each kind took to be whole again, and writes ``benchmarks/results/chaos.json``; ends with status 1
if the digests differ, a result that came twice differed, a stopped process is still there, or the run ended in a
way that is not documented or for which nobody was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from actors.client import launch
from actors.client.live_run import scale
from solrl_ray.errors import RunError, UserError
from solrl_ray.learning.engine import free_port
from solrl_ray.storage.run_folder import RunFolder
from tests.chaos.notes import Note, Reader, alive
from tests.chaos.noting import CLASSES
from tests.chaos.recovered import Disturbance, End, problems, summarized, unexplained
from tests.support.small import digests, folder, small_config, summary

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos.json"
NODES, CPUS = 2, 4
FOREVER = 1_000_000
"""Iterations of a run that is stopped by other means."""
SIZES = (
    "fleet={explorers: {count: 3, num_cpus: 1}, regenerators: {count: 1, num_cpus: 1}}",
    "fleet.learners={num_cpus: 1, threads: 1}",
    f"fleet.max_replacements={FOREVER}",
    "learner.world_size=2",
    "fleet.deadlines={resources: 120, explore: 20, regenerate: 40, update: 60, collective: 60, publish: 40}",
    "fleet.deadlines.selector=40",
    "evaluation={prompts: 2, samples: 2, steps: 3, pictures: 0, reference: ''}",
)
SIZES_OF_POOL = (2, 3, 4, 5)
PEACE = 600.0
"""Longest that the run may take from the last kill to its end, seconds."""
IMPATIENCE = 5.0
"""How long somebody is waited for in the state in which they are to be killed, seconds."""


class Kind(NamedTuple):
    name: str
    who: str
    doing: tuple[str, ...]
    weight: int
    signal: signal.Signals = signal.SIGKILL


IDLE = ("ready", "answered")
KINDS = (
    Kind("explorer, idle", "explorer", IDLE, 2),
    Kind("explorer, in a unit", "explorer", ("working",), 4),
    Kind("explorer, loading a revision", "explorer", ("loading",), 2),
    Kind("explorer, starting", "explorer", ("starting",), 1),
    Kind("explorer, stopped (SIGSTOP) in a unit", "explorer", ("working",), 1, signal.SIGSTOP),
    Kind("regenerator, idle", "regenerator", IDLE, 1),
    Kind("regenerator, in a unit", "regenerator", ("working",), 2),
    Kind("regenerator, loading a revision", "regenerator", ("loading",), 1),
    Kind("selector, idle", "selector", ("open",), 1),
    Kind("selector, taking a result", "selector", ("recording", "storing"), 2),
    Kind("learner rank, idle", "learner", ("joined", "loaded", "updated"), 1),
    Kind("learner rank, in an update", "learner", ("updating",), 2),
    Kind("text encoder", "text_encoder", ("idle",), 1),
    Kind("controller", "controller", (), 1),
    Kind("driver", "driver", (), 1),
    Kind("node", "node", (), 2),
    Kind("pool, another size", "pool", (), 2),
)


@dataclass
class Driver:
    """The process that a user would have started, started again whenever it has ended."""

    root: Path
    address: str
    ends: list[End] = field(default_factory=list)
    """Of those that ended by themselves."""
    process: subprocess.Popen[bytes] | None = None
    began: int = 0
    since: float = 0.0
    """When it was started last."""

    @property
    def log(self) -> Path:
        return self.root / f"driver-{self.began}.log"

    def start(self, *, iterations: int = FOREVER, name: str = "run") -> None:
        """Begin the run, or go on with it."""
        self.began, self.since = self.began + 1, time.monotonic()
        command = [sys.executable, "-m", "tests.chaos.soak", "--drive", str(self.root), name, self.address]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, str(iterations)], stdout=log, stderr=log, start_new_session=True)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def ended(self) -> int | None:
        """Its exit status, once it has ended; notes why if it was not killed."""
        assert self.process is not None
        status = self.process.poll()
        if status is not None and status > 0:
            said = [line for line in self.log.read_text().splitlines() if line.startswith("error: ")]
            sentence = said[-1].removeprefix("error: ") if said else f"status {status}, see {self.log}"
            self.ends.append(End(sentence, self.since))
        return status

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def drive(root: Path, name: str, address: str, iterations: int) -> int:
    """What the driver's process does: as ``solrl train``, with players that note what they do."""
    config = small_config(root, name, *SIZES, f"run.iterations={iterations}")
    resume = (folder(config) / "config.yaml").exists()
    try:
        return launch.train(config, resume=resume, address=address, live=False, classes=CLASSES)
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


class Chaos:
    """Who is killed when."""

    def __init__(self, root: Path, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.driver = Driver(root, cluster.address)
        self.reader = Reader(root / "notes.jsonl")
        self.run = root / "run"
        self.done: list[Disturbance] = []
        self.stopped: list[Note] = []
        self.gone: set[str] = set()
        """Nodes that were removed."""
        self.missed = 0
        self.deck: list[Kind] = []

    def rage(self, seconds: float, every: float) -> None:
        """Disturb for `seconds` after the first unit, somebody every `every` seconds on the average."""
        self.driver.start()
        self.wait_for_work()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pause = time.monotonic() + min(4 * every, self.random.expovariate(1 / every))
            while time.monotonic() < min(pause, end):
                self.keep_going()
                time.sleep(0.05)
            self.disturb(self.draw())

    def left_behind(self) -> int:
        """Stopped processes that are there still although their node is; ends them all."""
        left = [note for note in self.stopped if alive(note.pid)]
        for note in left:
            os.kill(note.pid, signal.SIGKILL)
        return len([note for note in left if note.node not in self.gone])

    def wait_for_work(self) -> None:
        deadline = time.monotonic() + PEACE
        while not any(note.doing == "answered" for note in self.reader.notes):
            assert self.driver.ended() is None, self.driver.log.read_text()
            assert time.monotonic() < deadline, f"nobody was at work within {PEACE:g} s; see {self.driver.log}"
            time.sleep(0.05)
            self.reader.read()

    def draw(self) -> Kind:
        """The next kind, as from a shuffled deck, so that each comes as often as its weight says."""
        if not self.deck:
            self.deck = [kind for kind in KINDS for _ in range(kind.weight)]
            self.random.shuffle(self.deck)
        return self.deck.pop()

    def keep_going(self) -> None:
        if self.driver.ended() is not None:
            self.driver.start()

    def disturb(self, kind: Kind) -> None:
        """Kill somebody of this kind, unless nobody comes into the wanted state in time."""
        if kind.who == "node":
            self.remove_node()
        elif kind.who == "pool":
            self.scale(kind)
        elif kind.who == "driver":
            self.note(kind, Note(time.monotonic(), "driver", self.driver.pid, "", ""))
            self.driver.kill()
        elif (found := self.find(kind)) is None:
            self.missed += 1
            self.deck.insert(0, kind)
        else:
            self.note(kind, found)
            with suppress(ProcessLookupError):  # somebody else's death took it along
                os.kill(found.pid, kind.signal)
            if kind.signal is signal.SIGSTOP:
                self.stopped.append(found)

    def find(self, kind: Kind) -> Note | None:
        deadline, stopped = time.monotonic() + IMPATIENCE, {note.pid for note in self.stopped}
        while time.monotonic() < deadline:
            if kind.who == "controller":
                found = self.controller()
            else:
                found = [
                    note
                    for note in self.reader.living()
                    if note.who.startswith(kind.who) and note.doing in kind.doing and note.pid not in stopped
                ]
            if found:
                return self.random.choice(sorted(found, key=lambda note: note.who))
            self.keep_going()
            time.sleep(0.02)
        return None

    def controller(self) -> list[Note]:
        """The process that has locked the run folder."""
        words = (self.run / "lock").read_text().split() if (self.run / "lock").exists() else []
        pid = int(words[1]) if len(words) > 1 else 0
        name = Path(f"/proc/{pid}/cmdline")
        mine = pid and name.exists() and b"ray::" in name.read_bytes()
        return [Note(time.monotonic(), "controller", pid, "", "")] if mine else []

    def remove_node(self) -> None:
        """Kill a node without grace, and have a new one join."""
        node = self.random.choice(self.cluster.worker_nodes_in_order())
        found = Note(time.monotonic(), "node", 0, node.node_id, "")
        victims = [note for note in self.reader.living() if note.node == node.node_id]
        self.gone.add(node.node_id)
        self.cluster.remove_node(node, allow_graceful=False)
        self.done.append(Disturbance("node", found, tuple(note.slot for note in victims)))
        self.cluster.join(wait=False)

    def scale(self, kind: Kind) -> None:
        """Have fewer or more explorers; a run that is not live just now is left alone."""
        at = time.monotonic()
        try:
            scale(self.run, {"explorers": self.random.choice(SIZES_OF_POOL)}, clusters=[self.cluster.address])
        except (UserError, RunError, RayError):
            self.missed += 1
            self.deck.insert(0, kind)
            return
        self.done.append(Disturbance(kind.name, Note(at, "pool", 0, "", ""), ()))

    def note(self, kind: Kind, found: Note) -> None:
        self.done.append(Disturbance(kind.name, replace(found, at=time.monotonic()), (found.slot,)))

    def finish(self) -> int:
        """Let the run end in peace, two iterations after the last checkpoint; returns its iterations."""
        if self.driver.ended() is None:
            self.driver.kill()
        iterations = max((n for n, _ in RunFolder(self.run).checkpoints()), default=0) + 2
        peace(self.driver, iterations, "run")
        return iterations


def peace(driver: Driver, iterations: int, name: str, seconds: float = PEACE) -> float:
    """Run to the end without any disturbance; returns the seconds from its start."""
    began = time.monotonic()
    driver.start(iterations=iterations, name=name)
    while (status := driver.ended()) is None:
        assert time.monotonic() - began < seconds, f"{name} did not end in {seconds:g} s; see {driver.log}"
        time.sleep(0.1)
    assert status == 0, f"{name} ended with {status}: {driver.log.read_text()}"
    return time.monotonic() - began


class Machines(Cluster):  # type: ignore[misc]
    """A head that runs the controller, and nodes for everybody else."""

    def __init__(self) -> None:
        store = {"object_store_memory": 150_000_000}
        head = {"num_cpus": 0, "include_dashboard": False, "dashboard_port": free_port(), **store}
        super().__init__(initialize_head=True, head_node_args=head)
        self._options = {"num_cpus": CPUS, **store}
        for _ in range(NODES):
            self.join()

    def join(self, *, wait: bool = True) -> None:
        self.add_node(wait=wait, **self._options)

    def worker_nodes_in_order(self) -> list[Any]:
        return sorted(self.worker_nodes, key=lambda node: node.node_id)


def soak(seconds: float, seed: int, every: float, root: Path) -> dict[str, Any]:
    cluster = Machines()
    try:
        chaos = Chaos(root, cluster, seed)
        began = time.monotonic()
        chaos.rage(seconds, every)
        iterations = chaos.finish()
        disturbed = time.monotonic() - began
        twin = Driver(root, cluster.address, began=chaos.driver.began)
        undisturbed = peace(twin, iterations, "twin", seconds=max(PEACE, seconds))
        chaos.reader.read()
        left_behind = chaos.left_behind()
    finally:
        cluster.shutdown()
    run, calm = (small_config(root, name, *SIZES) for name in ("run", "twin"))
    return {
        "seed": seed,
        "seconds": {"disturbed": round(disturbed, 1), "undisturbed": round(undisturbed, 1)},
        "iterations": iterations,
        "same_digests": digests(run) == digests(calm),
        "digests": dict(zip(("selection", "lora"), digests(run), strict=True)),
        "first_difference": first_difference(folder(run), folder(calm), iterations),
        "kinds": summarized(chaos.done, chaos.reader.notes),
        "disturbances": len(chaos.done),
        "nobody_in_that_state": chaos.missed,
        "drivers": chaos.driver.began,
        "ended_by_themselves": [end.sentence for end in chaos.driver.ends],
        "unexpected_ends": unexplained(chaos.driver.ends, chaos.done),
        "stopped_processes_left_behind": left_behind,
        "requeued_units": summary(run)["requeued_units"],
        "differing_results": sum(record.differing_results for record in RunFolder(folder(run)).read_metrics()),
        "conditions": {"cores": os.cpu_count(), "python": platform.python_version(), "ray": ray.__version__},
    }


def first_difference(run: Path, twin: Path, iterations: int) -> int | None:
    """The first iteration whose journal, if it is kept, begins with another plan, as with another policy; else None."""
    for iteration in range(iterations):
        one, other = (RunFolder(path).journal(iteration).entries() for path in (run, twin))
        if one and other and one[0]["plan"] != other[0]["plan"]:
            return iteration
    return None


def show(found: dict[str, Any]) -> None:
    print(f"{'killed':<40} {'times':>5} {'whole again':>12} {'median s':>9} {'max s':>7}")
    for name, row in found["kinds"].items():
        median, longest = (f"{row[key]:.1f}" if row[key] is not None else "-" for key in ("median", "max"))
        print(f"{name:<40} {row['times']:>5} {row['recovered']:>12} {median:>9} {longest:>7}")
    seconds = found["seconds"]
    print(
        f"{found['disturbances']} disturbances, {found['drivers']} drivers, {found['iterations']} iterations in "
        f"{seconds['disturbed']} s, undisturbed {seconds['undisturbed']} s; digests "
        f"{'the same' if found['same_digests'] else 'DIFFER'}"
    )
    for problem in problems(found):
        print(problem)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=900.0, help="how long it is disturbed")
    parser.add_argument("--every", type=float, default=8.0, help="mean seconds between two disturbances")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--drive", nargs=4, metavar=("ROOT", "NAME", "ADDRESS", "ITERATIONS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        root, name, address, iterations = arguments.drive
        return drive(Path(root), name, address, int(iterations))
    with tempfile.TemporaryDirectory(prefix="solrl-chaos-", ignore_cleanup_errors=True) as root:
        found = soak(arguments.seconds, arguments.seed, arguments.every, Path(root))
    show(found)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if problems(found) else 0


if __name__ == "__main__":
    sys.exit(main())
