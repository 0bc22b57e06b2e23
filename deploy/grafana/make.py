"""Write the Grafana dashboard from the table of metrics: ``python deploy/grafana/make.py``.

A gauge is drawn as it is, a counter as its rate, a histogram as its median and its 95th percentile.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from solrl_ray.metrics.instruments import INSTRUMENTS, Instrument

TARGET = Path(__file__).with_name("solrl.json")
COLUMNS, WIDTH, HEIGHT = 3, 8, 7


def expressions(entry: Instrument) -> list[tuple[str, str]]:
    """(PromQL, legend) of a panel. `WorkerId` and the like are aggregated away."""
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


def panel(number: int, entry: Instrument) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": entry.name.removeprefix("solrl_").replace("_", " "),
        "description": entry.meaning,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": "s" if entry.unit == "seconds" else "short"}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(expressions(entry))
        ],
    }


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
        "panels": [panel(number, entry) for number, entry in enumerate(INSTRUMENTS)],
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")
