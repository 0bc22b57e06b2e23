"""What a Prometheus and a Grafana read: deploy/prometheus.yml, and the dashboard against the metrics."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import yaml

from solrl_ray.metrics.instruments import INSTRUMENTS

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_the_dashboard_is_made_from_the_table_and_draws_every_metric_of_it() -> None:
    source = DEPLOY / "grafana" / "make.py"
    spec = importlib.util.spec_from_file_location("make", source)
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    stored = json.loads((DEPLOY / "grafana" / "solrl.json").read_text())
    assert stored == make.dashboard(), "make it again: python deploy/grafana/make.py"
    expressions = [target["expr"] for panel in stored["panels"] for target in panel.get("targets", [])]
    used = {name for expression in expressions for name in re.findall(r"\bray_\w+", expression)}
    exported = {e.scraped + ("_bucket" if e.kind == "histogram" else "") for e in INSTRUMENTS}
    assert used == exported


def test_no_panel_covers_another() -> None:
    panels = json.loads((DEPLOY / "grafana" / "solrl.json").read_text())["panels"]
    taken = set()
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken
        taken |= cells


def test_prometheus_reads_the_list_that_ray_writes() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    assert job["file_sd_configs"][0]["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]
