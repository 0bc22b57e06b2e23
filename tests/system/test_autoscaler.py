"""Ray's own autoscaler, whose nodes are processes here: it gives a run that waits the nodes that are missing."""

from __future__ import annotations

from pathlib import Path

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.autoscaler.v2.sdk import get_cluster_status

from actors.cluster.capacity import await_resources
from actors.fleet.actor_factory import ActorClasses, ActorFactory
from tests.chaos.test_learners import Light
from tests.chaos.test_nodes import elsewhere
from tests.support.heads import head
from tests.support.learning import config as learner_config

SECONDS = 240.0


def kind(role: str) -> dict[str, object]:
    resources = {"CPU": 2, "object_store_memory": 80_000_000}
    return {"resources": resources, "labels": {"role": role}, "node_config": {}, "min_workers": 0, "max_workers": 2}


CLUSTER = {
    "cluster_name": "fake",
    "max_workers": 4,
    "idle_timeout_minutes": 5,
    "provider": {
        "type": "external",  # `fake_multinode` reads a file that Ray's wheels lack
        "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
        "disable_node_updaters": True,
        "head_node_id": FAKE_HEAD_NODE_ID,
        "launch_multiple": True,
    },
    "head_node_type": FAKE_HEAD_NODE_TYPE,
    # Nothing is done to nodes but to start them.
    **{f"{who}setup_commands": [] for who in ("", "head_", "worker_")},
    **{f"{who}_start_ray_commands": [] for who in ("head", "worker")},
    "initialization_commands": [],
    "cluster_synced_files": [],
    "file_mounts": {},
    "auth": {},
    "available_node_types": {
        FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "first": kind("other"),
        "second": kind("explorer"),
    },
}


def roles() -> list[str]:
    """Of the nodes that have joined."""
    return sorted(node["Labels"]["role"] for node in ray.nodes() if node["Alive"] and "role" in node["Labels"])


def node_of(actor: object) -> str:
    """Called on an actor: the id of the node that it is on."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def wait_and_work(address: str, root: str) -> None:
    folder = Path(root)
    explorers = {"count": 2, "num_cpus": 1, "labels": {"role": "explorer"}}
    settings = learner_config(folder, fleet={"explorers": explorers, "deadlines": {"resources": SECONDS}})
    ray.init(address=address, log_to_driver=False)
    assert roles() == []
    await_resources(settings)
    assert roles() == ["explorer"]
    asked = get_cluster_status(address).resource_demands.cluster_constraint_demand
    assert [bundle for demand in asked for bundle in demand.bundles_by_count] == []

    # Later an actor that waits is demand by itself, with its second choice where there can be no node of its first.
    explorers |= {"labels": {"role": "spare"}, "fallback_labels": [{"role": "explorer"}]}
    factory = ActorFactory(learner_config(folder, fleet={"explorers": explorers}), folder, ActorClasses(explorer=Light))
    workers = [factory.explorer(f"explorer-{n}") for n in range(3)]
    nodes = ray.get([worker.handle.__ray_call__.remote(node_of) for worker in workers], timeout=SECONDS)
    assert len(set(nodes)) == 2
    assert roles() == ["explorer", "explorer"]


def test_an_autoscaler_gives_the_nodes_that_a_run_waits_for_and_is_not_asked_for_them_any_longer(
    forked_workers: None, forks: str, tmp_path: Path
) -> None:
    variables = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "RAY_enable_autoscaler_v2": "1",
    }
    with (
        head(cpus=0, scaling=CLUSTER, variables=variables) as made,
        elsewhere(forks, wait_and_work, made.address, str(tmp_path)),
    ):
        pass
