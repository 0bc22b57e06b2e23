"""Beside awaiting, the controller's process does things through `World.blocking`: nothing else may hold its loop up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("dispatch", "evaluation", "fleet", "monitoring", "training")
OUTSIDE = {"actor_factory.py", "prometheus.py"}
"""Ray's side of a room; `ray_world.py` uses them."""
MODULES = sorted(
    path
    for path in (ROOT / "actors/controller.py", ROOT / "actors/run_components.py", *(ROOT / "actors").glob("*/*.py"))
    if path.name not in OUTSIDE and (path.parent.name in ROOMS or path.parent.name == "actors")
)
BLOCKS = {"ray", "threading", "subprocess", "socket", "concurrent", "multiprocessing"}
CALLS = {"sleep": "asyncio", "open": "", "input": ""}
"""Function → of which module alone it may be called; of none, if empty."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_controllers_rooms_neither_import_nor_call_what_blocks(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not BLOCKS & {name.partition(".")[0] for name in names}, f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
            assert isinstance(node.func.value, ast.Name)
            assert node.func.value.id == CALLS["sleep"], f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert CALLS.get(node.func.id, "here"), f"line {node.lineno}: {node.func.id}"
