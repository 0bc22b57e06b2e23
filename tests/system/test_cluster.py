"""A run on a cluster that is there already, with several nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from solrl_ray.config.schema import Config
from tests.small import digests, folder, small_config


@pytest.fixture
def two_nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    yield cluster
    cluster.shutdown()


def solrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "solrl_ray", "train", *arguments, "--no-live"],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
def test_a_run_on_an_existing_cluster_has_the_same_bytes(calm: Config, two_nodes: Cluster, tmp_path: Path) -> None:
    here = ("--address", two_nodes.address, "--set", f"run.root='{tmp_path}'", "--set", "run.name=joined")
    stored = str(folder(calm) / "config.yaml")

    # More than the cluster has is said at once; the corrected command may use the same run name.
    greedy = solrl(stored, *here, "--set", "fleet.explorers.num_gpus=1")
    assert greedy.returncode == 2
    assert greedy.stderr.startswith("error: the actors ask for 1 GPUs (fleet.explorers 1), but the cluster has 0;")

    # The CPUs that explorers ask for are only on the second node.
    done = solrl(stored, *here, "--set", "fleet.explorers={count: 2, num_cpus: 1}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(small_config(tmp_path, "joined")) == digests(calm)
