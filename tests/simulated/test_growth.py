"""What a controller holds does not grow with the number of iterations, and neither does its run folder."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest

from actors.controller import Controller
from solrl_ray.storage import run_folder
from tests.simulated import runs
from tests.simulated.plans import Plan

MEASURED = ("Telemetry.iterations", "Telemetry.evaluations")
"""The records of a run; they do grow."""
REMEMBERED = 4
"""Of some things the newest few are kept; what grows by one an iteration grows by 6."""
FOLDERS = ("checkpoints", "samples", "journal")


def sizes(root: Any) -> Counter[str]:
    """Class and name of each container of ours that can be reached → how many things it holds, over all objects."""
    found, seen, todo = Counter[str](), set[int](), [("", root)]
    while todo:
        name, one = todo.pop()
        kind = type(one)
        if id(one) in seen or name in MEASURED:
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | set | deque):
            found[name] += len(one)
            todo += [(f"{name}[]", each) for each in (one.values() if isinstance(one, dict) else one)]
        elif kind.__module__.startswith(("actors.", "solrl_ray.")):
            slots = [each for base in kind.__mro__ for each in getattr(base, "__slots__", ())]
            names = [*getattr(one, "__dict__", ()), *slots]
            todo += [(f"{kind.__name__}.{each}", getattr(one, each, None)) for each in names]
    return found


@pytest.mark.parametrize("explorers", [1, 2])
def test_what_is_held_is_the_same_after_twice_as_many_iterations(
    explorers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Counter[str]] = []
    check = runs.check_forgotten

    def checked(controller: Controller, processes: list[Any]) -> None:
        check(controller, processes)
        assert controller._run is not None
        folder: Any = controller._run.folder.path
        held.append(sizes(controller) + Counter({name: len(list((folder / name).iterdir())) for name in FOLDERS}))

    monkeypatch.setattr(runs, "check_forgotten", checked)
    monkeypatch.setattr(run_folder, "JOURNALS", 1)
    for iterations in (6, 12):
        shape = replace(Plan.of(4).shape, iterations=iterations, staleness=1, every=1)
        assert runs.run(Plan(1, shape, explorers=explorers, regenerators=1, ranks=1)).digests
    few, many = held
    # What was answered since the last look for late units is remembered, too.
    assert len(few) > 40
    assert not {name: (few[name], many[name]) for name in many if many[name] > few[name] + 2 * REMEMBERED}
