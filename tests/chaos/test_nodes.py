"""Nodes that are about to go, and nodes that join late: the fleet moves, the bytes stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from tests.small import digests, folder, small_config

PATIENCE = 240.0
PLACE = {"role": "explorer"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head, and a node for two explorers."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=2, labels=PLACE)
    yield made
    made.shutdown()


def wait_for(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def attested(run: Path) -> set[str]:
    file = run / "attestations.json"
    return {entry["worker"] for entry in json.loads(file.read_text())} if file.exists() else set()


@pytest.mark.slow
def test_workers_leave_a_node_that_is_about_to_go_for_one_that_joins_late(
    calm: Config, cluster: Cluster, tmp_path: Path
) -> None:
    config = small_config(
        tmp_path,
        "moved",
        "fleet.explorers={count: 2, num_cpus: 1, labels: {role: explorer}}",
        "fleet.max_replacements=0",  # who leaves in time is no failure
        "fleet.deadlines.preview=600",
    )
    run, file = folder(config), tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.gated import main; main()", cluster.address, str(file)],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(process, lambda: len(list(tmp_path.glob("at-gate-1-explorer-?"))) == 2)
    (old,) = cluster.worker_nodes
    preempted, soon = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, int((time.time() + 600.0) * 1000)
    accepted, why = GcsClient(address=cluster.address).drain_node(old.node_id, preempted, "a test", soon)
    assert accepted, why

    # Room for one of the two who take their place; the other one goes on waiting for a node.
    cluster.add_node(num_cpus=1, labels=PLACE)
    wait_for(process, lambda: bool({"explorer-0.1", "explorer-1.1"} & attested(run)))
    (tmp_path / "gate-1").touch()
    wait_for(process, lambda: any(tmp_path.glob("at-gate-2-explorer-?.1")))
    (tmp_path / "gate-2").touch()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert digests(config) == digests(calm)
    assert "the node of explorer-0 is about to go: it leaves, explorer-0.1 takes its place" in output
    assert "explorer-0 has left" in output
