"""Write tests/unit/project/kuberay.json: ``python -m tests.support.kuberay_schemas CRDS``.

CRDS is `helm-chart/kuberay-operator/crds/` of github.com/ray-project/kuberay (Apache License 2.0). What is kept is what
the API server checks strictly of a RayJob's and a RayCluster's ``spec``: keys, types, choices. Pod templates are left
out; Kubernetes' own schemas check those.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parents[1] / "unit" / "project" / "kuberay.json"
ANY = {"type": "object"}
PODS = ("template", "submitterPodTemplate", "headService")


def strict(node: Any) -> Any:
    """Structural OpenAPI as JSON Schema: unknown keys are refused, ``int-or-string`` is said in its words."""
    if isinstance(node, list):
        return [strict(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: strict(value) for key, value in node.items() if not key.startswith("x-") and key != "description"}
    properties = made.get("properties")
    if isinstance(properties, dict) and made.get("type") == "object":
        made["properties"] = {key: ANY if key in PODS else value for key, value in properties.items()}
        made["additionalProperties"] = False
    return made


def spec(folder: Path, plural: str) -> dict[str, Any]:
    """The schema of ``spec`` in the definition's version v1."""
    path = folder / f"ray.io_{plural}.yaml"
    raw = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
    definition = yaml.load(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1")
    made: dict[str, Any] = strict(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    return made


def kind(name: str) -> dict[str, Any]:
    properties = {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": name}, "metadata": ANY}
    properties["spec"] = {"$ref": f"#/$defs/{name}"}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def main(folder: Path) -> None:
    job, cluster = spec(folder, "rayjobs"), spec(folder, "rayclusters")
    assert job["properties"]["rayClusterSpec"] == cluster, "a RayJob's cluster is no RayCluster any more"
    job["properties"]["rayClusterSpec"] = {"$ref": "#/$defs/RayCluster"}
    schema = {
        "$comment": "KubeRay 1.7: made by tests/support/kuberay_schemas.py from helm-chart/kuberay-operator/crds/ of "
        "github.com/ray-project/kuberay, Apache License 2.0, as of August 2026",
        "$defs": {"RayJob": job, "RayCluster": cluster},
        "oneOf": [kind("RayJob"), kind("RayCluster")],
    }
    TARGET.write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
