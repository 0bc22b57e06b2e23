"""What is in deploy/: manifests against the schemas of their operators, the dashboard against the metrics."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml

from solrl_ray import cli
from solrl_ray.config import checks
from solrl_ray.config.loading import load
from solrl_ray.config.pools import takes_turns
from solrl_ray.metrics.instruments import INSTRUMENTS
from solrl_ray.scheduling import placement

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy"
CRDS = Path(os.environ.get("SOLRL_KUBERAY_CRDS") or REPOSITORY / ".." / "shared" / "data" / "kuberay")
"""KubeRay's resource definitions: in the folder that the variable names, else in one beside the repository."""
KUBERNETES = "1.33"
KIND_SCHEMA = "ray.io_rayjobs.yaml"


def manifest(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay" / name).read_text())
    return read


@pytest.fixture(scope="module")
def rayjob() -> dict[str, Any]:
    return manifest("rayjob.yaml")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The RayJob schema of KubeRay's resource definitions, refusing unknown keys as the API server does strictly."""
    found = [path for path in (CRDS / KIND_SCHEMA, CRDS / f"{KIND_SCHEMA}.gz") if path.is_file()]
    if not found:
        pytest.skip(
            f"there is no {KIND_SCHEMA} in {CRDS}; set SOLRL_KUBERAY_CRDS to a folder with KubeRay's resource "
            "definitions (helm-chart/kuberay-operator/crds/ of its repository)"
        )
    raw = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
    definition = yaml.load(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1")
    closed: dict[str, Any] = strict(version["schema"]["openAPIV3Schema"])
    closed["properties"]["metadata"] = {"type": "object"}
    return closed


def strict(node: Any) -> Any:
    """Structural OpenAPI as JSON Schema: unknown keys refused, ``int-or-string`` said in its words."""
    if isinstance(node, list):
        return [strict(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: strict(value) for key, value in node.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def groups(rayjob: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


def test_the_rayjob_is_valid_by_kuberays_schema(rayjob: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.validate(rayjob, schema)


@pytest.mark.parametrize("wrong", [{"minReplica": 1}, {"maxReplicas": "eight"}])
def test_the_schema_refuses_a_misspelt_key_and_a_wrong_type(
    wrong: dict[str, Any], rayjob: dict[str, Any], schema: dict[str, Any]
) -> None:
    changed = json.loads(json.dumps(rayjob))
    changed["spec"]["rayClusterSpec"]["workerGroupSpecs"][1] |= wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, schema)


def test_pods_and_the_volume_are_valid_by_kubernetes_schemas(rayjob: dict[str, Any]) -> None:
    cluster = rayjob["spec"]["rayClusterSpec"]
    for number, group in enumerate([cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    kubernetes_validate.validate(manifest("runs-volume.yaml"), KUBERNETES, strict=True)


def test_explorers_scale_learners_do_not_and_both_drain(rayjob: dict[str, Any]) -> None:
    learner, explorer = groups(rayjob)["learner"], groups(rayjob)["explorer"]
    assert learner["minReplicas"] == learner["replicas"] == learner["maxReplicas"]
    assert explorer["minReplicas"] < explorer["maxReplicas"]
    for group in (learner, explorer):
        pod = group["template"]["spec"]
        (command,) = (c["lifecycle"]["preStop"]["exec"]["command"][-1] for c in pod["containers"])
        deadline = re.search(r"ray drain-node .*--deadline-remaining-seconds (\d+)", command)
        assert deadline is not None
        assert pod["terminationGracePeriodSeconds"] > int(deadline[1])
    cluster = rayjob["spec"]["rayClusterSpec"]
    assert cluster["authOptions"]["mode"] == "token"
    assert cluster["rayVersion"] == ray.__version__


def test_every_pod_keeps_the_hubs_cache_on_its_volume_and_hides_nothing_of_the_image(rayjob: dict[str, Any]) -> None:
    cluster = rayjob["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        (home,) = (variable["value"] for variable in container["env"] if variable["name"] == "HF_HOME")
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounted.values())
        assert mounted[home] == "models"
        assert not [path for path in mounted if path.startswith(("/root", "/solrl"))]  # its default cache; WORKDIR


def test_the_run_of_the_rayjob_has_room_on_its_groups_at_their_largest(
    rayjob: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    python, *words = shlex.split(rayjob["spec"]["entrypoint"])
    assert (python, *words[:2]) == ("python", "-m", "solrl_ray")
    arguments = cli.parser().parse_args(words[2:])
    monkeypatch.chdir(REPOSITORY)
    config = load(arguments.config, arguments.set)
    checks.check(config)
    nodes = [
        placement.Node(
            resources={
                "GPU": float(requests["nvidia.com/gpu"]),
                "CPU": float(requests["cpu"]),
            },
            labels=group["labels"],
        )
        for group in groups(rayjob).values()
        for requests in [group["template"]["spec"]["containers"][0]["resources"]["requests"]]
        for _ in range(group["maxReplicas"])
    ]
    assert [entry.missing for entry in placement.fit(placement.requests(config), nodes)] == [0, 0, 0]


@pytest.mark.parametrize(("name", "gpus"), [("one_gpu", 1), ("eight_gpus", 8)])
def test_a_cluster_file_gives_each_gpu_one_worker_of_each_kind_and_fits_every_model_and_strategy(
    name: str, gpus: int
) -> None:
    configs, cluster = REPOSITORY / "configs", REPOSITORY / f"configs/clusters/{name}.yaml"
    machine = placement.Node(resources={"GPU": float(gpus), "CPU": 3.0 * gpus}, labels={})
    prompts = "prompts={train: builtin:testbed/prompts/train.txt, heldout: builtin:testbed/prompts/heldout.txt}"
    models = [path for path in (configs / "models").glob("*.yaml") if path.stem != "testbed"]
    knowing = "rollout.accept_quantized_training=true"
    for model, strategy in product(models, (configs / "strategies").glob("*.yaml")):
        parts = [model, strategy, configs / "methods/diffusion_nft.yaml", configs / "rewards/hpsv2.yaml", cluster]
        config = load(parts, [prompts, knowing])
        checks.check(config)
        assert takes_turns(config.fleet)
        asked = placement.requests(config)
        assert [request.total("GPU") for request in asked] == pytest.approx([0.26 * gpus, 0.23 * gpus, 0.51 * gpus])
        assert [entry.missing for entry in placement.fit(asked, [machine])] == [0, 0, 0]


def test_the_dashboard_is_made_from_the_table_and_draws_every_metric_of_it() -> None:
    source = DEPLOY / "grafana" / "make.py"
    spec = importlib.util.spec_from_file_location("make", source)
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    stored = json.loads((DEPLOY / "grafana" / "solrl.json").read_text())
    assert stored == make.dashboard(), "make it again: python deploy/grafana/make.py"
    expressions = [target["expr"] for panel in stored["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"\bray_\w+", expression)}
    exported = {e.scraped + ("_bucket" if e.kind == "histogram" else "") for e in INSTRUMENTS}
    assert used == exported


def test_prometheus_reads_the_list_that_ray_writes() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    assert job["file_sd_configs"][0]["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]
