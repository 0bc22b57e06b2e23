"""Time that is waited for or measured is that of a monotonic clock: setting a machine's clock changes nothing."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
STAMPS = {
    "actors/workers/sampling_worker.py": "when a unit was begun, for the timeline",
    "actors/workers/regenerator.py": "the same",
    "actors/monitoring/telemetry.py": "when a stage was begun, for the timeline",
    "solrl_ray/validation/report.py": "when a checkpoint was validated, for the report",
    "solrl_ray/storage/run_folder.py": "when a run was begun or resumed, for its report",
}
"""Who may read the wall clock, and what for. None of these is waited for, compared or subtracted."""
DATES = {"solrl_ray/rewards/endpoint.py": "a server's Retry-After may be a date; the wait is bounded"}
"""Who compares it with a date that another machine sent."""


def reads_of_the_wall_clock(source: str) -> list[ast.AST]:
    """Places that name ``time.time``, ``datetime.now`` and their like."""
    tree = ast.parse(source)
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime")
        for alias in node.names
    }
    assert not imported & {"time", "time_ns"}, "import the module, so that a clock is named where it is read"
    named = {
        "time": ("time", "time_ns", "localtime", "gmtime"),
        "datetime": ("now", "utcnow", "today"),
        "date": ("today",),
    }
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and node.attr in named.get(node.value.id if isinstance(node.value, ast.Name) else node.value.attr, ())
    ]


def test_the_wall_clock_is_read_for_stamps_alone() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for package in ("solrl_ray", "actors")
        for path in (ROOT / package).rglob("*.py")
        if reads_of_the_wall_clock(path.read_text())
    }
    assert readers == STAMPS.keys() | DATES.keys()


def test_nothing_is_computed_from_a_stamp_where_it_is_taken() -> None:
    for name in STAMPS:
        source = (ROOT / name).read_text()
        tree = ast.parse(source)
        arithmetic = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp | ast.Compare)]
        inside = [
            segment for node in arithmetic if "time.time" in (segment := ast.get_source_segment(source, node) or "")
        ]
        assert inside == [], name
