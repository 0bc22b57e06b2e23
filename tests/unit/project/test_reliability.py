"""The failure table of docs/reference/failures.md: every line names tests that exist and the command that runs them,
and the sentences that it quotes are looked for by these tests."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMANDS = {"test": "`make test`", "faults": "`make test-faults`"}
"""Level → who runs it in continuous integration. What is marked slow only `make test-all` runs."""
NAMED = re.compile(r"`([a-z_/]+/test_\w+\.py)::([\w…]+)`")
VARIES = re.compile(r"…|[();:]|[\w-]*\d[\w./-]*")
"""Between the parts of a sentence that every run says alike: names, numbers, and what is left out."""


def lines() -> Iterator[tuple[str, str, str, str]]:
    """(what dies, what is seen, tests, run by) of every line of the page's failure tables."""
    inside = False
    for line in (ROOT / "docs" / "reference" / "failures.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[-2:] == ["test", "run by"]:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and set(cells[0]) != {"-"}:
            yield cells[0], cells[2] if len(cells) == 6 else "", cells[-2], cells[-1]


def marks(node: ast.AST) -> set[str]:
    """Those that are named in it: ``slow`` of ``pytest.mark.slow``."""
    inner = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Attribute))
    return {n.attr for n in inner if isinstance(n.value, ast.Attribute) and n.value.attr == "mark"}


def of_parameters(decorator: ast.expr) -> list[set[str]]:
    """The marks of each of a decorator's sets of parameters, its own among them."""
    if not isinstance(decorator, ast.Call) or marks(decorator.func) != {"parametrize"}:
        return [marks(decorator)]
    sets = decorator.args[1].elts if isinstance(decorator.args[1], ast.List | ast.Tuple) else []
    own = [[marks(k.value) for k in one.keywords if k.arg == "marks"] for one in sets if isinstance(one, ast.Call)]
    plain = not sets or any(not isinstance(one, ast.Call) for one in sets)
    return [set().union(*found) for found in own] + [set()] * plain


@functools.cache
def declared(file: str) -> dict[str, frozenset[str]]:
    """Test → levels of its cases: ``test``, ``faults`` or ``slow``."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    everywhere = set().union(
        *(marks(n.value) for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark")
    )
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            cases = itertools.product(*map(of_parameters, node.decorator_list))
            found[node.name] = frozenset(level(everywhere.union(*case)) for case in cases)
    return found


def level(named: set[str]) -> str:
    return next((mark for mark in ("slow", "faults") if mark in named), "test")


def levels(file: str, pattern: str) -> frozenset[str]:
    """Those of the one test that a name with ``…`` for what is left out stands for."""
    wanted = ".*".join(map(re.escape, pattern.split("…")))
    names = [name for name in declared(file) if re.fullmatch(wanted, name)]
    assert len(names) == 1, f"{file}::{pattern} is {names or 'no test'}"
    return declared(file)[names[0]]


def sentences(seen: str) -> list[str]:
    """Those that a line quotes; a single word is a metric or a command."""
    return [quoted for quoted in re.findall(r"`([^`]+)`", seen) if quoted.count(" ") > 2]


def looked_for(sentence: str, searched: str) -> bool:
    """Whether one of the parts that every run says alike, of two words at least, is searched for."""
    parts = (part.strip(" ,/") for part in VARIES.split(sentence))
    return any(part in searched for part in parts if " " in part)


@functools.cache
def literals(file: str) -> str:
    """All strings of a test's file but docstrings, patterns among them, as text to search."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    documents = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    strings = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in documents)
    return "\n".join(n.value for n in strings if isinstance(n.value, str)).replace("\\", "")


LINES = pytest.mark.parametrize(
    ("what", "seen", "named", "run_by"), [pytest.param(*line, id=line[0][:60]) for line in lines()]
)


@LINES
def test_what_a_line_says_that_is_seen_is_looked_for_by_one_of_its_tests(
    what: str, seen: str, named: str, run_by: str
) -> None:
    searched = "\n".join(literals(file) for file, _ in NAMED.findall(named))
    assert [sentence for sentence in sentences(seen) if not looked_for(sentence, searched)] == []


@LINES
def test_a_line_of_the_failure_table_names_its_tests_and_who_runs_them(
    what: str, seen: str, named: str, run_by: str
) -> None:
    tests = NAMED.findall(named)
    assert tests, f"no test proves what is said of: {what}"
    found = frozenset[str]().union(*(levels(file, pattern) for file, pattern in tests))
    assert "slow" not in found
    assert run_by == ", ".join(command for mark, command in COMMANDS.items() if mark in found)


def test_continuous_integration_runs_both_commands() -> None:
    assert "make test-ci" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert "test-ci: CHOSEN := not slow" in makefile  # neither those of `make test` are left out nor the others


def test_levels_are_read_from_marks_of_files_functions_and_parameters() -> None:
    assert declared("chaos/test_memory.py") == {"test_memory_does_not_grow_over_200_iterations": frozenset({"slow"})}
    assert levels("system/test_publishing.py", "…is_sent_again…") == {"test", "faults"}
    assert levels("system/test_fallback.py", "test_each_low…resume") == {"slow"}
    assert levels("unit/scheduling/test_hedging.py", "test_a_unit_is_late…") == {"test"}
    assert levels("chaos/test_messages.py", "test_lost…") == {"faults"}
