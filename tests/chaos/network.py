"""A network that misbehaves: runs on three nodes that end with the digests of a run on one machine.

    python -m tests.chaos.network [CASE …] [--root FOLDER]

Each node has its own network, /tmp and host name, and its own Ray (`tests.chaos.switch`); one that ends is started
again under its name, as a service manager does. The first node has the run folder and the learner, the others have the
explorers and the regenerator. All cases have the same configuration, and a disturbance begins in the second iteration,
while workers have units.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from solrl_ray.config.loading import to_yaml
from tests.chaos import switch
from tests.chaos.switch import Node, Switch
from tests.support import forkserver
from tests.support.small import small_config

BIN = Path(sys.executable).parent
FORKS = Path("/tmp/forks")
"""Where each node has its own server of forks: Ray's workers start in no time, also those that replace others."""
PORT = 6379
LIMIT = 900.0
"""Seconds of a run."""
SIZES = (
    "fleet.max_replacements=20",
    "fleet.deadlines={resources: 300, explore: 60, regenerate: 60, update: 120, publish: 60}",
)
PLACES = (
    "fleet.explorers={count: 2, num_cpus: 1, labels: {role: far}}",
    "fleet.regenerators={count: 1, num_cpus: 1, labels: {role: far}}",
    "fleet.learners={num_cpus: 1, threads: 1, labels: {role: head}}",
)


class Machines:
    """Three nodes with Ray, and the switch between them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes = [Node(number, root / f"node-{number}") for number in (1, 2, 3)]
        self.switch = Switch(self.nodes)
        self.switch.start()
        self._spared: dict[int, frozenset[int]] = {}
        for node in self.nodes:
            (node.tmp / FORKS.name).mkdir()
            code = f"from pathlib import Path; from tests.support import forkserver as f; f.start(Path({str(FORKS)!r}))"
            node.start(sys.executable, "-c", code, log=root / f"forks-{node.number}.log")
        for node in self.nodes:
            wait_until("a server of forks", (node.tmp / FORKS.name / forkserver.SOCKET).exists, 300.0)
            self._spared[node.number] = frozenset(node.pids())
        log = root / "ray-1.log"
        log.touch()
        for node in self.nodes:
            threading.Thread(target=self._keep, args=(node,), daemon=True).start()
            wait_until("the head", lambda: "runtime started" in log.read_text(), 300.0)
        wait_until("three nodes", lambda: self._count() == 3, 300.0)

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def ray(self) -> str:
        return f"{self.head.address}:{PORT}"

    def end(self, number: int) -> None:
        """End all of a node's Ray at once; it is started again."""
        self.nodes[number - 1].kill(spare=self._spared[number])

    def _keep(self, node: Node) -> None:
        """Start its Ray whenever it has ended."""
        first = node is self.head
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if first else [f"--address={self.ray}"]
        role, cpus = ("head", 1) if first else ("far", 3)
        options = [f"--node-ip-address={node.address}", f"--node-name=node-{node.number}", f"--num-cpus={cpus}"]
        options += [f"--labels=role={role}", "--object-store-memory=100000000", "--disable-usage-stats"]
        while True:
            command = (str(BIN / "ray"), "start", "--block", *where, *options)
            log = self.root / f"ray-{node.number}.log"
            node.start(*command, log=log, RAY_prestart_worker_first_driver="0", RAY_AUTH_MODE="disabled").wait()
            self.end(node.number)
            time.sleep(1.0)

    def _count(self) -> int:
        code = (
            "import sys; from ray._raylet import GcsClient; "
            "print(sum(n.state == 0 for n in GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10).values()))"
        )
        done = subprocess.run(
            self.head.command(sys.executable, "-c", code, self.ray),
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"RAY_AUTH_MODE": "disabled"},
            check=False,
        )
        return int(done.stdout.split()[-1]) if done.returncode == 0 else 0


def wait_until(what: str, reached: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} never came within {seconds:g} s")
        time.sleep(0.1)


Disturb = Callable[[Machines], None]


@dataclass(frozen=True)
class Case:
    what: str
    disturb: Disturb = lambda machines: None
    after: str = "iteration 1/"
    """What the run says before the disturbance begins."""


def links(**values: float) -> Disturb:
    return lambda machines: machines.switch.set(**values)


def cut(*numbers: int, seconds: float) -> Disturb:
    def disturb(machines: Machines) -> None:
        machines.switch.isolate(*numbers)
        time.sleep(seconds)
        machines.switch.isolate(*numbers, cut=False)

    return disturb


def cut_one_way(machines: Machines) -> None:
    machines.switch.set([(1, 2)], cut=True)
    time.sleep(20.0)
    machines.switch.set([(1, 2)], cut=False)


CASES = {
    "calm": Case("a network that is well"),
    "slow": Case("50 ms each way, 1 % of the frames lost", links(delay=0.05, loss=0.01)),
    "narrow": Case("5 Mbit/s", links(rate=625_000.0)),
    "one-way": Case("a node hears nothing for 20 s", cut_one_way),
    "cut": Case("a node cut off for 90 s", cut(2, seconds=90.0)),
    "raylet": Case("a raylet killed", lambda machines: machines.nodes[1].kill("raylet")),
    "two": Case("two nodes cut off at once for 60 s", cut(2, 3, seconds=60.0)),
    "publishing": Case("a node cut off for 30 s during publishing", cut(2, seconds=30.0), "publishing revision 2"),
    "returns": Case("a node killed, back under its name", lambda machines: machines.end(2)),
}


@dataclass(frozen=True)
class Outcome:
    case: str
    status: int
    seconds: float
    lost: int
    """Workers whose loss the run reports."""
    digests: tuple[str, str] | None


def run(machines: Machines, name: str) -> Outcome:
    """A run, disturbed; the network is well again afterwards."""
    head, case = machines.head, CASES[name]
    file, said = head.tmp / f"{name}.yaml", machines.root / f"{name}.log"
    file.write_text(to_yaml(small_config(Path("/tmp/runs"), name, *SIZES, *PLACES)))
    began = time.monotonic()
    with said.open("w") as output:
        process = subprocess.Popen(
            head.command(sys.executable, "-m", "solrl_ray", "train", f"/tmp/{name}.yaml", "--no-live"),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {"RAY_ADDRESS": machines.ray, "RAY_AUTH_MODE": "disabled"}
            | forkserver.environment(f"{sys.executable} -S -E {forkserver.CLIENT} {FORKS / forkserver.SOCKET}"),
        )
    try:
        wait_until("the disturbance", lambda: case.after in said.read_text() or process.poll() is not None, LIMIT)
        case.disturb(machines)
        status = process.wait(LIMIT)
    except (subprocess.TimeoutExpired, TimeoutError):
        process.kill()
        status = 124
    seconds = time.monotonic() - began
    machines.switch.set(delay=0.0, loss=0.0, rate=float("inf"), cut=False)
    lost = len(re.findall(r" was lost \(", said.read_text()))
    return Outcome(name, status, seconds, lost, digests(head.tmp / "runs" / name))


def digests(folder: Path) -> tuple[str, str] | None:
    try:
        found = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        return None
    return found["selection_digest"], found["lora_digest"]


def alone(root: Path) -> tuple[str, str]:
    """The digests of an undisturbed run on one machine, without a network."""
    file = root / "alone.yaml"
    file.write_text(to_yaml(small_config(root / "runs", "alone", *SIZES)))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with (root / "alone.log").open("w") as output:
        command = [sys.executable, "-m", "solrl_ray", "train", str(file), "--no-live"]
        variables = os.environ | {"RAY_AUTH_MODE": "disabled"}
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=variables, check=True, timeout=LIMIT)
    found = digests(root / "runs" / "alone")
    assert found is not None
    return found


def row(outcome: Outcome, calm: float, wanted: tuple[str, ...]) -> str:
    equal = "equal" if outcome.digests == wanted else "DIFFER"
    what, later = CASES[outcome.case].what, outcome.seconds - calm
    return f"{what:45} {outcome.status:6} {outcome.seconds:8.0f} {later:12.0f} {outcome.lost:12} {equal}"


HEADING = f"{'case':45} {'status':>6} {'seconds':>8} {'seconds lost':>12} {'replacements':>12} digests"


@contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
    else:
        with tempfile.TemporaryDirectory(prefix="solrl-network-", ignore_cleanup_errors=True) as made:
            yield Path(made)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.network", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--root", type=Path, help="a folder, which is kept, for run folders and what was printed")
    parser.add_argument("--digests", nargs=2, metavar="DIGEST", help="of a run on one machine, which is not run then")
    given = parser.parse_args(arguments)
    if unknown := {*given.cases} - {*CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if os.environ.get(switch.INSIDE) != "1":
        if why := switch.why_not():
            print(f"error: {why}", file=sys.stderr)
            return 2
        with folder(given.root) as root:
            again = [*given.cases, "--root", str(root.absolute())]
            again += ["--digests", *given.digests] if given.digests else []
            return subprocess.run(switch.inside("tests.chaos.network", again), check=False).returncode
    print(HEADING, flush=True)
    wanted = tuple(given.digests) if given.digests else alone(given.root)
    machines, calm, failed = Machines(given.root), math.nan, False
    chosen = given.cases or list(CASES)
    for name in chosen if given.digests else dict.fromkeys(["calm", *chosen]):
        outcome = run(machines, name)
        calm = outcome.seconds if name == "calm" else calm
        print(row(outcome, calm, wanted), flush=True)
        failed |= outcome.status != 0 or outcome.digests != wanted
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
