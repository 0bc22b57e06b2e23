"""Nodes that are about to go, and nodes that join late: the fleet moves, the bytes stay."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from actors.cluster.capacity import draining
from actors.fleet.actor_factory import ActorClasses, ActorFactory
from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from tests.chaos.learner_ranks import Light, light_group
from tests.support import gated
from tests.support.forkserver import calling
from tests.support.heads import BIN, end
from tests.support.learning import config as learner_config
from tests.support.patience import patience, wait_until
from tests.support.small import digests, folder, small_config

PLACE = {"role": "explorer"}


@pytest.fixture
def cluster(forked_workers: None) -> Iterator[Cluster]:
    """A head."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


@contextmanager
def node_for_two(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node for two explorers, as users start it. It joins later."""
    options = ("--num-cpus=2", "--labels=role=explorer", "--object-store-memory=100000000", "--disable-usage-stats")
    node = subprocess.Popen(
        [BIN / "ray", "start", "--block", f"--address={address}", *options],
        env=os.environ | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "600", "PATH": f"{BIN}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield node
    finally:
        if node.poll() is None:
            end(node)


def wait_for(process: subprocess.Popen[str], said: Path, reached: Callable[[], bool]) -> None:
    def told() -> bool:
        assert process.poll() is None, said.read_text()
        return reached()

    wait_until("the wanted state", told, 240.0)


def drain(address: str, node: str) -> None:
    preempted, soon = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, int((time.time() + 600.0) * 1000)
    accepted, why = GcsClient(address=address).drain_node(node, preempted, "a test", soon)
    assert accepted, why


def attested(run: Path) -> set[str]:
    file = run / "attestations.json"
    return {entry["worker"] for entry in json.loads(file.read_text())} if file.exists() else set()


@pytest.fixture
def old(cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    with node_for_two(cluster.address) as node:
        yield node


def test_workers_leave_nodes_that_are_about_to_go_for_one_that_joins_late_and_the_run_folders_node_is_told(
    calm: Config, forks: str, cluster: Cluster, old: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    config = small_config(
        tmp_path,
        "moved",
        # No node is their first choice.
        "fleet.explorers={count: 2, num_cpus: 1, labels: {role: spare}, fallback_labels: [{role: explorer}]}",
        "fleet.max_replacements=0",  # who leaves in time is no failure
        "fleet.deadlines={explore: 1800, resources: 1800}",  # the explorers' node is still joining
    )
    run, file, said = folder(config), tmp_path / "config.yaml", tmp_path / "said"
    file.write_text(to_yaml(config))
    with said.open("w") as output:
        process = subprocess.Popen(
            calling(forks, gated.train, cluster.address, str(file)),
            env=os.environ | {"RAY_AUTH_MODE": "disabled"},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    wait_for(process, said, lambda: len(list(tmp_path.glob("at-gate-1-explorer-?"))) == 2)
    old.terminate()  # its Ray says that the node is about to go, and waits for who works there

    # Room for one of the two who take their place; the other one goes on waiting for a node.
    cluster.add_node(num_cpus=1, labels=PLACE)
    wait_for(process, said, lambda: bool({"explorer-0.1", "explorer-1.1"} & attested(run)))
    (tmp_path / "gate-1").touch()
    wait_for(process, said, lambda: any(tmp_path.glob("at-gate-2-explorer-?.1")))
    wait_for(process, said, lambda: old.poll() is not None)  # once nobody worked there

    # The head is the run folder's node: who may leaves it, and the others work as long as it is there.
    drain(cluster.address, cluster.head_node.node_id)
    going = "the node of the run folder is leaving, and with it the controller, the selector and the text encoders: "
    going += "continue with --resume once the run has ended"
    wait_for(process, said, lambda: going in said.read_text())
    (tmp_path / "gate-2").touch()
    process.wait(patience(240.0))
    assert process.returncode == 0, said.read_text()
    assert digests(config) == digests(calm)
    assert "the node of explorer-0 is leaving: explorer-0.1 replaces it" in said.read_text()
    assert "explorer-0 has left" in said.read_text()
    assert "the node of regenerator-0 is leaving: regenerator-0.1 replaces it" in said.read_text()


@contextmanager
def elsewhere(forks: str, function: Callable[..., None], *arguments: str) -> Iterator[None]:
    """Call a function in a process of its own, for this one has joined another cluster; it must not raise."""
    command = calling(forks, function, *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield
        said, _ = process.communicate(timeout=patience(240.0))
    assert process.returncode == 0, said


def leave_for_a_node_that_joins(address: str, root: str) -> None:
    """Touches `stayed` when there was no room elsewhere."""
    folder = Path(root)
    fleet = {"learners": {"num_cpus": 1, "labels": PLACE}, "deadlines": {"start": 600.0}}
    settings = learner_config(folder, learner={"world_size": 2}, fleet=fleet)
    ray.init(address=address, log_to_driver=False)
    said: list[str] = []

    async def scenario() -> None:
        learners = light_group(settings, ActorFactory(settings, folder, ActorClasses(learner=Light)), said)
        await learners.spawn()
        await learners.start(None)
        learners.saved()
        (old,) = learners._nodes
        drain(address, old)
        await learners.leave(draining())
        assert learners._nodes == {old}
        assert "find no room elsewhere yet" in said[-1]
        (folder / "stayed").touch()
        while learners._nodes == {old}:
            await learners.leave(draining())
        assert await learners.state() == ("learner-0.1", "the checkpoint", 2)

    asyncio.run(scenario())
    assert said[-1] == "a node of the learner group is leaving: the group continues elsewhere, from the last checkpoint"


def test_learner_ranks_leave_a_node_that_is_about_to_go_once_there_is_room(
    cluster: Cluster, forks: str, tmp_path: Path
) -> None:
    with elsewhere(forks, leave_for_a_node_that_joins, cluster.address, str(tmp_path)):
        cluster.add_node(num_cpus=2, labels=PLACE)
        wait_until("who stays", (tmp_path / "stayed").exists)
        cluster.add_node(num_cpus=2, labels=PLACE)


def three_roles_on_each_card(address: str, root: str) -> None:
    """And no room for an explorer of no card, because the cards have all GPUs."""
    folder, whole = Path(root), {"num_gpus": 1}
    fleet = {"placement": "colocated", "learners": whole, "explorers": whole, "regenerators": whole}
    settings = learner_config(folder / "nowhere", learner={"world_size": 2}, fleet=fleet)
    ray.init(address=address, log_to_driver=False)
    factory = ActorFactory(settings, folder, ActorClasses())
    assert factory.reserve_learner_bundles(60.0)
    kinds = [
        [factory.explorer(f"explorer-{n}") for n in range(3)],
        [factory.regenerator(f"regenerator-{n}") for n in range(2)],
        [factory.learner(rank) for rank in range(2)],  # last, and yet their places were kept
    ]
    for explorer, regenerator, learner in zip(*kinds, strict=False):
        assert explorer.handle is regenerator.handle is learner.handle
    cards = [explorer.handle.__ray_call__.remote(lambda _: ray.get_gpu_ids()) for explorer in kinds[0]]
    assert sorted(ray.get(cards[:2], timeout=patience(240.0))) == [[0], [1]]
    assert ray.wait(cards[2:], timeout=1.0) == ([], cards[2:])
    for worker in chain(*kinds):  # they would outlive the cluster's nodes
        ray.kill(worker.handle)


def test_each_card_has_a_gpu_and_one_process_for_its_roles(cluster: Cluster, forks: str, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1, num_gpus=2)
    with elsewhere(forks, three_roles_on_each_card, cluster.address, str(tmp_path)):
        pass
