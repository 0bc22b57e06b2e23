"""What a run exports to Prometheus, and its timeline: scraped and read from one real run."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from solrl_ray.config.schema import Config
from solrl_ray.metrics.instruments import INSTRUMENTS
from tests.support.live import begun
from tests.support.patience import patience, wait_until
from tests.support.small import folder, small_config
from tests.support.spans import ended, read_spans

DOCS = Path(__file__).parents[2] / "docs"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""(sample name, tags) → value; tags without those that Ray adds."""


def scrape(run: str) -> tuple[dict[str, str], Samples]:
    """Metric families (name → type) and samples of one run, from the node's endpoint."""
    (node,) = (node for node in ray.nodes() if node["Alive"])
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    tags = {"run", "le"} | {tag for entry in INSTRUMENTS for tag in entry.tags}
    families, samples = {}, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("run") == run and sample.name.startswith("ray_solrl_"):
                families[family.name] = family.type
                samples[sample.name, frozenset((k, v) for k, v in sample.labels.items() if k in tags)] = sample.value
    return families, samples


def tagged(**tags: str) -> frozenset[tuple[str, str]]:
    return frozenset({"run": "watched", **tags}.items())


def exported() -> tuple[dict[str, str], Samples]:
    """`scrape`, once all of the run is there."""
    last = ("ray_solrl_heldout_reward_mean", tagged(policy="ema"))
    wait_until("the last figure of the run", lambda: last in scrape("watched")[1])
    return scrape("watched")


@pytest.fixture(scope="module")
def watched(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A finished run of one iteration whose controller still lives, so that its metrics can be scraped."""
    config = small_config(tmp_path_factory.mktemp("watched"), "watched", "run.iterations=1", "fleet.explorers.count=2")
    handle, done = begun(config)
    ray.get(done, timeout=patience(240.0))
    yield config
    ray.kill(handle)


def test_the_scraped_metrics_are_those_of_the_table_with_the_values_of_the_run(watched: Config) -> None:
    families, samples = exported()
    # The parser takes the suffix _total off a counter's name.
    assert families == {e.scraped.removesuffix("_total"): e.kind for e in INSTRUMENTS}
    lines = (folder(watched) / "metrics.jsonl").read_text().splitlines()
    (measured,) = (record for line in lines if (record := json.loads(line))["event"] == "iteration")
    assert samples["ray_solrl_reward_mean", tagged()] == pytest.approx(measured["reward_mean"])
    assert samples["ray_solrl_rank_fidelity", tagged()] == pytest.approx(measured["spearman"])
    assert samples["ray_solrl_candidates_total", tagged()] == 3 * 8
    assert samples["ray_solrl_samples_total", tagged()] == 3 * 4
    assert samples["ray_solrl_unit_seconds_count", tagged(stage="explore")] == 3 * 8 / 4
    assert samples["ray_solrl_unit_seconds_count", tagged(stage="regenerate")] == 3
    assert samples["ray_solrl_attested_workers", tagged(role="explorer", tier="nvfp4-emulated")] == 2
    assert samples["ray_solrl_workers", tagged(role="regenerator", state="ready")] == 1
    assert samples["ray_solrl_revision", tagged(role="regenerator")] == 1
    assert samples["ray_solrl_replacements_left", tagged()] == watched.fleet.max_replacements
    entries = {entry.name: entry for entry in INSTRUMENTS}
    assert all(len(tags - {"le"}) <= 1 + 2 for _, tags in samples)
    assert {tag for entry in entries.values() for tag in entry.tags} == {
        *("stage", "policy", "role", "state", "tier", "measure")
    }


def test_figures_that_are_set_once_an_iteration_stay(watched: Config) -> None:
    """Ray forgets a gauge some 20 s after it was set; those of the iteration were, when the run ended at the latest."""
    before = exported()[0]
    time.sleep(max(0.0, (folder(watched) / "summary.json").stat().st_mtime + 35.0 - time.time()))
    assert scrape("watched")[0] == before


def test_the_documented_table_is_the_table_in_the_code() -> None:
    """A row an instrument: name as scraped, type, unit, tags beside ``run``, meaning."""
    rows = [
        f"| `{entry.scraped}` | {entry.kind} | {entry.unit} | "
        f"{', '.join(f'`{tag}`' for tag in entry.tags)} | {entry.meaning} |\n"
        for entry in INSTRUMENTS
    ]
    header = "| name | type | unit | tags | meaning |\n|---|---|---|---|---|\n"
    assert header + "".join(rows) in (DOCS / "reference" / "metrics.md").read_text()


def test_the_timeline_has_every_unit_once_and_adds_up_to_the_measured_seconds(watched: Config) -> None:
    spans = read_spans(folder(watched))
    units = [span for span in spans if span.kind == "unit"]
    names = [span.name for span in units if span.stage != "evaluate"]
    assert len(names) == len(set(names)) == 3 * 8 / 4 + 3
    assert {span.worker for span in units} == {"explorer-0", "explorer-1", "regenerator-0"}
    assert {span.stage for span in spans if span.kind == "stage"} == {
        "start",
        "publish",
        "evaluate",
        "rollout",
        "learn",
        "checkpoint",
        "report",
    }
    for worker in {span.worker for span in units}:
        ordered = [span for span in units if span.worker == worker]
        assert all(ended(one) <= next_one.started + 0.001 for one, next_one in pairwise(ordered))
    lines = (folder(watched) / "metrics.jsonl").read_text().splitlines()
    (measured,) = (record for line in lines if (record := json.loads(line))["event"] == "iteration")
    for stage in ("explore", "regenerate"):
        assert sum(s.seconds for s in units if s.stage == stage) == pytest.approx(measured["busy_seconds"][stage])
