"""A run on a cluster that is there already, with several nodes, one of which goes without grace."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from solrl_ray.config.schema import Config
from solrl_ray.storage.run_folder import RunFolder
from tests.support.forkserver import solrl
from tests.support.patience import patience, wait_until
from tests.support.small import digests, folder, small_config, summary


@pytest.fixture
def two_nodes(forked_workers: None) -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    yield cluster
    cluster.shutdown()


def train(forks: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        solrl(forks, "train", *arguments, "--no-live"),
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def explorers_of(cluster: Cluster) -> list[psutil.Process]:
    """Processes of the cluster's explorers: other clusters of this machine have explorers too."""
    gcs = int(cluster.address.rpartition(":")[2])
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, IndexError):
            if process.cmdline()[0].startswith("ray::Explorer"):
                peers = [connection.raddr for connection in process.net_connections()]
                if any(peer and peer.port == gcs for peer in peers):
                    found.append(process)
    return found


def test_a_run_on_a_cluster_that_loses_a_node_and_gets_another_has_the_same_bytes(
    calm: Config, forks: str, two_nodes: Cluster, tmp_path: Path
) -> None:
    here = ("--address", two_nodes.address, "--set", f"run.root='{tmp_path}'", "--set", "run.name=joined")
    stored = str(folder(calm) / "config.yaml")

    # The CPUs that explorers ask for are only on the second node: with it all of them go, in the middle of a unit. They
    # are stopped before, because a worker goes on for a moment after its node's raylet has ended.
    config = small_config(tmp_path, "joined")
    run = train(forks, stored, *here, "--set", "fleet.explorers={count: 2, num_cpus: 1}")

    def goes_on() -> bool:
        assert run.poll() is None, run.communicate()[0]
        return True

    wait_until("both explorers", lambda: goes_on() and len(explorers_of(two_nodes)) == 2)
    explorers = explorers_of(two_nodes)
    journal = RunFolder.of(config).journal(1)
    wait_until("the first candidates of iteration 1", lambda: goes_on() and len(journal.entries()) >= 2)
    for explorer in explorers:
        explorer.suspend()
    [node] = two_nodes.worker_nodes
    try:
        two_nodes.remove_node(node, allow_graceful=False)
    finally:
        for explorer in explorers:
            explorer.kill()  # a stopped process would stay
    two_nodes.add_node(num_cpus=2)
    said, _ = run.communicate(timeout=patience(240.0))
    assert run.returncode == 0, said
    for name in ("explorer-0", "explorer-1"):
        assert f"{name} was lost" in said
    assert digests(config) == digests(calm)
    assert summary(config)["requeued_units"] >= 1
