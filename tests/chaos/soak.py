"""A soak: a run whose processes and nodes are killed at random for minutes ends with the bytes of an undisturbed one.

    python -m tests.chaos.soak --seconds 900 --seed 1

Real workers on a Ray cluster of several raylets on this machine; they are forks, so that a replacement is there soon.
Every few seconds somebody is chosen by the seed and killed in a state that is chosen, too; the driver is resumed
whenever it has ended. After `--seconds` the run is left in peace for two more iterations, and then its twin makes the
same number of iterations undisturbed. Prints what was survived and writes it to `--out`; ends with status 1 if the
digests differ, a result that came twice differed, a stopped process is still there, or the run ended in a way that is
not documented or for which nobody was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from actors.client.live_run import scale
from solrl_ray.errors import RunError, UserError
from solrl_ray.learning.engine import free_port
from solrl_ray.report.data import read_run
from solrl_ray.storage.run_folder import RunFolder
from tests.chaos.driver import PEACE, SIZES, Driver, peace
from tests.chaos.notes import Note, Reader, alive
from tests.chaos.noting import UNHURRIED
from tests.chaos.verdict import Disturbance, problems, unexplained
from tests.support import forkserver
from tests.support.small import digests, folder, small_config, summary

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos.json"
NODES, CPUS = 2, 4
SIZES_OF_POOL = (2, 3, 4, 5)
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


class Chaos:
    """Who is killed when."""

    def __init__(self, root: Path, cluster: Cluster, forks: str, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.driver = Driver(root, cluster.address, forks)
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
            self.note(kind, Note(time.monotonic(), "driver", 0, "", ""))
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
        self.gone.add(node.node_id)
        self.done.append(Disturbance("node", Note(time.monotonic(), "node", 0, node.node_id, "")))
        self.cluster.remove_node(node, allow_graceful=False)
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
        self.done.append(Disturbance(kind.name, Note(at, "pool", 0, "", "")))

    def note(self, kind: Kind, found: Note) -> None:
        self.done.append(Disturbance(kind.name, replace(found, at=time.monotonic())))

    def finish(self) -> int:
        """Let the run end in peace, two iterations after the last checkpoint; returns its iterations."""
        if self.driver.ended() is None:
            self.driver.kill()
        iterations = max((n for n, _ in RunFolder(self.run).checkpoints()), default=0) + 2
        peace(self.driver, iterations, "run")
        return iterations


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


def soak(seconds: float, seed: int, every: float, root: Path, forks: str, *, hurry: bool = True) -> dict[str, Any]:
    """
    Args:
        forks: as `tests.support.forkserver.shared` yields it; this process's nodes start workers by it.
        hurry: if not, the disturbed run makes few iterations, so that its twin takes little time.
    """
    cluster = Machines()
    try:
        chaos = Chaos(root, cluster, forks, seed)
        began = time.monotonic()
        if not hurry:
            (root / UNHURRIED).touch()
        chaos.rage(seconds, every)
        (root / UNHURRIED).unlink(missing_ok=True)
        iterations = chaos.finish()
        disturbed = time.monotonic() - began
        twin = Driver(root, cluster.address, forks, began=chaos.driver.began)
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
        "kinds": dict(sorted(Counter(each.kind for each in chaos.done).items())),
        "disturbances": len(chaos.done),
        "nobody_in_that_state": chaos.missed,
        "drivers": chaos.driver.began,
        "ended_by_themselves": [end.sentence.partition("; go on with")[0] for end in chaos.driver.ends],
        "unexpected_ends": unexplained(chaos.driver.ends, chaos.done),
        "stopped_processes_left_behind": left_behind,
        "requeued_units": summary(run)["requeued_units"],
        "differing_results": sum(record.differing_results for record in read_run(folder(run)).iterations),
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
    print(f"{'killed':<40} {'times':>5}")
    for name, times in found["kinds"].items():
        print(f"{name:<40} {times:>5}")
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
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="solrl-chaos-", ignore_cleanup_errors=True) as root,
        forkserver.shared(Path(root)) as forks,
        forkserver.forked(forks),
    ):
        found = soak(arguments.seconds, arguments.seed, arguments.every, Path(root), forks)
    show(found)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if problems(found) else 0


if __name__ == "__main__":
    sys.exit(main())
