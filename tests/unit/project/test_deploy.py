"""Manifests of deploy/kuberay/ against the schemas of KubeRay and Kubernetes, and the runs that they start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml

from solrl_ray import cli
from solrl_ray.config import checks, named
from solrl_ray.config.loading import load
from solrl_ray.config.pools import pools
from solrl_ray.scheduling import placement
from tests.support.processes import output_of

REPOSITORY = Path(__file__).parents[3]
KUBERAY = REPOSITORY / "deploy" / "kuberay"
SCHEMA = json.loads(Path(__file__).with_name("kuberay.json").read_text())
KUBERNETES = "1.33"
BUILT = ("cluster", "run", "demo")
POLICY = "network-policy.yaml"


def build(folder: Path) -> dict[str, Any]:
    """The one resource that ``kubectl apply -k`` makes of a folder."""
    tool = shutil.which("kubectl"), shutil.which("kustomize")
    if not any(tool):
        pytest.skip("neither kubectl nor kustomize is here to build the folders of deploy/kuberay")
    command = [str(tool[0]), "kustomize", str(folder)] if tool[0] else [str(tool[1]), "build", str(folder)]
    (resource,) = yaml.safe_load_all(output_of(*command))
    return resource  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=BUILT)
def resource(request: pytest.FixtureRequest) -> dict[str, Any]:
    return build(KUBERAY / request.param)


@pytest.fixture(scope="module", params=BUILT[1:])
def rayjob(request: pytest.FixtureRequest) -> dict[str, Any]:
    return build(KUBERAY / request.param)


def cluster_of(resource: dict[str, Any]) -> dict[str, Any]:
    return resource["spec"]["rayClusterSpec"] if resource["kind"] == "RayJob" else resource["spec"]  # type: ignore[no-any-return]


def groups(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the head, then of the workers."""
    cluster = cluster_of(resource)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def test_what_is_applied_is_valid_by_kuberays_schema(resource: dict[str, Any]) -> None:
    jsonschema.validate(resource, SCHEMA)
    assert cluster_of(resource)["authOptions"]["mode"] == "token"
    assert cluster_of(resource)["rayVersion"] == ray.__version__


def test_pods_are_valid_by_kubernetes_schemas(resource: dict[str, Any]) -> None:
    for number, group in enumerate(groups(resource)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["volumes.yaml", "models.yaml", POLICY])
def test_what_is_not_of_kuberay_is_valid_by_kubernetes_schemas(name: str) -> None:
    for resource in yaml.safe_load_all((KUBERAY / name).read_text()):
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_what_is_mounted_is_there_and_hides_nothing_of_the_image(resource: dict[str, Any]) -> None:
    claims = {claim["metadata"]["name"] for claim in yaml.safe_load_all((KUBERAY / "volumes.yaml").read_text())}
    for group in groups(resource):
        volumes = {volume["name"]: volume for volume in group["template"]["spec"].get("volumes", [])}
        mounted = {mount["mountPath"]: mount["name"] for mount in container(group).get("volumeMounts", [])}
        assert set(volumes) == set(mounted.values())
        claimed = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
        assert claimed <= claims
        assert not [path for path in mounted if path.startswith(("/home", "/solrl"))]  # its default cache; WORKDIR
        homes = [variable["value"] for variable in container(group).get("env", []) if variable["name"] == "HF_HOME"]
        assert all(mounted[home] == "models" for home in homes)
    assert "/runs" in {mount["mountPath"] for mount in container(groups(resource)[0])["volumeMounts"]}


def pods() -> list[dict[str, Any]]:
    built = [group["template"]["spec"] for folder in BUILT for group in groups(build(KUBERAY / folder))]
    return [*built, yaml.safe_load((KUBERAY / "models.yaml").read_text())["spec"]["template"]["spec"]]


def test_no_pod_has_more_rights_than_it_needs() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        (only,) = pod["containers"]
        assert only["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_network_policy_trusts_no_label_of_a_foreign_namespace() -> None:
    policy = yaml.safe_load((KUBERAY / POLICY).read_text())
    selectors = [peer.get("namespaceSelector") for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    assert {} not in selectors


def test_workflows_may_only_read_and_name_actions_by_their_content() -> None:
    for file in (REPOSITORY / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(file.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
        assert used
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each) for each in used)


def test_explorers_scale_learners_do_not_and_both_drain() -> None:
    cluster = yaml.safe_load((KUBERAY / "cluster" / "raycluster.yaml").read_text())
    learner, explorer = groups(cluster)[1:]
    assert learner["minReplicas"] == learner["replicas"] == learner["maxReplicas"]
    assert explorer["minReplicas"] < explorer["maxReplicas"]
    for group in (learner, explorer):
        command = container(group)["lifecycle"]["preStop"]["exec"]["command"][-1]
        deadline = re.search(r"ray drain-node .*--deadline-remaining-seconds (\d+)", command)
        assert deadline is not None
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > int(deadline[1])


def test_a_run_has_the_cluster_that_stands_and_an_image_is_named_once() -> None:
    run = build(KUBERAY / "run")
    assert cluster_of(run) == yaml.safe_load((KUBERAY / "cluster" / "raycluster.yaml").read_text())["spec"]
    for folder in BUILT:
        (image,) = yaml.safe_load((KUBERAY / folder / "kustomization.yaml").read_text())["images"]
        assert {container(group)["image"] for group in groups(build(KUBERAY / folder))} == {f"{image['name']}:latest"}


@pytest.mark.parametrize("folder", ["cluster", "run"])
def test_a_history_is_collected_where_the_component_is_named(folder: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERAY, tmp_path / "kuberay")
    kustomization = tmp_path / "kuberay" / folder / "kustomization.yaml"
    text = kustomization.read_text()
    assert "# components: [../history]" in text
    kustomization.write_text(text.replace("# components:", "components:"))
    resource = build(kustomization.parent)
    jsonschema.validate(resource, SCHEMA)
    assert cluster_of(resource)["historyServerOptions"]["collectorOptions"]["image"].startswith("quay.io/kuberay/")
    assert "historyServerOptions" not in cluster_of(build(KUBERAY / folder))


def test_the_network_policy_lets_in_what_the_head_is_asked_on() -> None:
    policy = yaml.safe_load((KUBERAY / POLICY).read_text())
    open_to = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
    for folder in BUILT:
        ports = {port["name"]: port["containerPort"] for port in container(groups(build(KUBERAY / folder))[0])["ports"]}
        assert open_to == {ports["dashboard"], ports["metrics"]}
    (unlimited,) = (rule for rule in policy["spec"]["ingress"] if "ports" not in rule)
    (peer,) = unlimited["from"]
    assert peer == {"podSelector": policy["spec"]["podSelector"]}


def test_the_run_of_a_rayjob_has_room_on_its_groups_at_their_largest(
    rayjob: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    python, *words = shlex.split(rayjob["spec"]["entrypoint"])
    assert (python, *words[:2]) == ("python", "-m", "solrl_ray")
    arguments = cli.parser().parse_args(words[2:])
    monkeypatch.chdir(REPOSITORY)
    config = load(named.resolve(arguments.config), arguments.set)
    checks.check(config)
    assert config.run.root == "/runs"
    nodes = []
    for group in groups(rayjob):
        requests = container(group)["resources"]["requests"]
        resources = {"GPU": float(requests.get("nvidia.com/gpu", 0)), "CPU": float(requests["cpu"])}
        nodes += [placement.Node(resources=resources, labels=group.get("labels", {}))] * group.get("maxReplicas", 1)
    asked = placement.requests(config)
    assert sum(request.total("CPU") for request in asked) > 0
    assert [entry.missing for entry in placement.fit(asked, nodes)] == [0, 0, 0]


@pytest.mark.parametrize(("name", "gpus"), [("one_gpu", 1), ("eight_gpus", 8)])
def test_a_cluster_file_gives_each_gpu_one_process_and_fits_every_model_and_strategy(name: str, gpus: int) -> None:
    configs, cluster = REPOSITORY / "configs", REPOSITORY / f"configs/clusters/{name}.yaml"
    machine = placement.Node(resources={"GPU": float(gpus), "CPU": 3.0 * gpus}, labels={})
    prompts = "prompts={train: builtin:testbed/prompts/train.txt, heldout: builtin:testbed/prompts/heldout.txt}"
    models = [path for path in (configs / "models").glob("*.yaml") if path.stem != "testbed"]
    knowing = "rollout.accept_quantized_training=true"
    for model, strategy in product(models, (configs / "strategies").glob("*.yaml")):
        parts = [model, strategy, configs / "methods/diffusion_nft.yaml", configs / "rewards/hpsv2.yaml", cluster]
        config = load(parts, [prompts, knowing])
        checks.check(config)
        assert [pool.count for pool in pools(config.fleet).values()] == [gpus, gpus]
        (cards,) = placement.requests(config)
        assert cards.total("GPU") == gpus
        assert [entry.missing for entry in placement.fit([cards], [machine])] == [0]
