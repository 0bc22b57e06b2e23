"""Write the Grafana dashboard from the table of metrics: ``python deploy/grafana/make.py``.

A gauge is drawn as it is, a counter as its rate, a histogram as its median and its 95th percentile. The first row shows
current values; below it are curves, one row per question that users open the dashboard with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from solrl_ray.metrics.instruments import INSTRUMENTS, Instrument

TARGET = Path(__file__).with_name("solrl.json")
GRID, WIDTH, HEIGHT = 24, 8, 7
STAT_WIDTH, STAT_HEIGHT = 4, 4

NOW = ("iteration", "seconds_left", "reward_mean", "heldout_reward_mean", "rank_fidelity", "workers")
ROWS = {
    "Reward: does the policy improve?": ("reward_mean", "heldout_reward_mean", "proxy_reward_mean"),
    "Fidelity: do previews rank as full precision does?": ("rank_fidelity", "attested_workers"),
    "Stages: where does the time go?": (
        *("stage_seconds", "unit_seconds", "seconds_left", "stage_done", "stage_planned", "candidates", "dropped"),
        *("samples", "iteration", "iterations_planned"),
    ),
    "Who waits, and for what?": ("workers", "weights_wait_share", "weights_wait_seconds", "revision", "receipts"),
    "Learning": ("loss", "policy_loss", "kl", "gradient_norm"),
    "What went wrong": (
        "alarm",
        *("workers_lost", "replacements_left", "refused_answers"),
        *("requeued_units", "duplicate_results", "differing_results"),
    ),
    "Reward servers and judges": ("reward_requests", "reward_retries", "reward_tokens"),
}


def expressions(entry: Instrument) -> list[tuple[str, str]]:
    """(PromQL, legend) of a panel. Labels added by Ray, such as `WorkerId`, are aggregated away."""
    by = ", ".join(("run", *entry.tags))
    legend = " ".join(f"{{{{{tag}}}}}" for tag in ("run", *entry.tags))
    chosen = f'{entry.scraped}{{run=~"$run"}}'
    if entry.kind == "gauge":
        return [(f"max by ({by}) ({chosen})", legend)]
    if entry.kind == "counter":
        return [(f"sum by ({by}) (rate({chosen}[$__rate_interval]))", legend)]
    bucket = f'{entry.scraped}_bucket{{run=~"$run"}}'
    rate = f"sum by ({by}, le) (rate({bucket}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", f"{legend} p{round(100 * q)}") for q in (0.5, 0.95)]


def panel(kind: str, entry: Instrument) -> dict[str, Any]:
    """A panel of Grafana's type `kind`, without its position."""
    made = {
        "type": kind,
        "title": entry.name.removeprefix("solrl_").replace("_", " "),
        "description": entry.meaning,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": "s" if entry.unit == "seconds" else "short"}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(expressions(entry))
        ],
    }
    if kind == "stat":
        made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "textMode": "auto"}
    return made


def panels() -> list[dict[str, Any]]:
    """All panels with their positions; every metric of the table has a curve."""
    entries = {entry.name.removeprefix("solrl_"): entry for entry in INSTRUMENTS}
    drawn = [name for row in ROWS.values() for name in row]
    assert sorted(drawn) == sorted(entries), set(drawn) ^ set(entries)
    made: list[dict[str, Any]] = []
    y = _add(made, [panel("stat", entries[name]) for name in NOW], 0, STAT_WIDTH, STAT_HEIGHT)
    for title, names in ROWS.items():
        y = _add(made, [{"type": "row", "title": title, "collapsed": False, "panels": []}], y, GRID, 1)
        y = _add(made, [panel("timeseries", entries[name]) for name in names], y, WIDTH, HEIGHT)
    return [{"id": number, **one} for number, one in enumerate(made, start=1)]


def _add(to: list[dict[str, Any]], some: list[dict[str, Any]], y: int, width: int, height: int) -> int:
    """Place panels of one size side by side from `y` downwards; returns the `y` below them."""
    across = GRID // width
    for number, one in enumerate(some):
        line, column = divmod(number, across)
        to.append({**one, "gridPos": {"x": column * width, "y": y + line * height, "w": width, "h": height}})
    return y + -(-len(some) // across) * height


def dashboard() -> dict[str, Any]:
    run = {
        "name": "run",
        "type": "query",
        "label": "run",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": f"label_values({INSTRUMENTS[0].scraped}, run)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
    }
    source = {"name": "source", "type": "datasource", "label": "data source", "query": "prometheus"}
    return {
        "uid": "solrl",
        "title": "solrl_ray",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, run]},
        "panels": panels(),
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")
