"""What a process imports before it knows what it has to do: seconds of every start, and of every replacement."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from actors.client import launch
from actors.client.controller_actor import ControllerActor
from solrl_ray.common.lazy_imports import import_large
from tests.support import made_runs
from tests.support.processes import python

HEAVY = {"torch._dynamo", "transformers", "diffusers", "peft", "deepspeed", "accelerate", "matplotlib", "tensorboard"}


def imported(*modules: str) -> set[str]:
    """Names in `sys.modules` of a new interpreter that has imported `modules`."""
    return modules_after(f"import {', '.join(modules)}")


def modules_after(program: str) -> set[str]:
    """Names in `sys.modules` of a new interpreter that has run `program`."""
    program += "\nimport sys; print(*sys.modules)"
    return set(python("-c", program).splitlines()[-1].split())


def test_controller_driver_and_workers_import_no_model_library_before_they_start() -> None:
    """The controller imports every role's module, because it makes the actors."""
    found = imported("actors.client.launch", "actors.controller")
    assert {"actors.workers.explorer", "actors.workers.selector", "actors.workers.learner_rank", "torch"} <= found
    assert not found & HEAVY


def test_commands_that_compute_nothing_do_without_torch() -> None:
    found = imported("solrl_ray.cli", "solrl_ray.scheduling.placement", "actors.client.live_run")
    assert not found & {"torch", *HEAVY}
    assert not imported("solrl_ray.cli") & {"torch", "ray", "numpy"}


def test_a_users_reward_that_fails_is_told_without_torch(tmp_path: Path) -> None:
    """Its child imports it, and once is enough."""
    (tmp_path / "mine.py").write_text("raise SystemError('no torch was needed')")
    settings = (f"rewards=[{{kind: '{tmp_path}/mine.py:f'}}]", f"run.root={tmp_path}")
    arguments = ["train", "demo", "--dry-run", *(part for one in settings for part in ("--set", one))]
    found = modules_after(f"from solrl_ray.cli import main\nassert main({arguments!r}) == 2")
    assert "solrl_ray.cli.reward_trial" in found
    assert not found & {"torch", *HEAVY}


def test_asking_a_run_how_it_is_and_scaling_it_do_without_torch(tmp_path: Path) -> None:
    """Also who finds it live: what Ray imports for its controller is the module of `ControllerActor`."""
    run = made_runs.write_run(tmp_path / "ended")
    found = modules_after(
        f"import {ControllerActor.__module__}\n"
        f"from solrl_ray.cli import main\n"
        f"assert main(['status', {str(run)!r}]) == 0\n"
        f"assert main(['pool', 'scale', {str(run)!r}, '--explorers', '2']) == 2"
    )
    assert "ray" in found
    assert launch.ControllerActor is ControllerActor
    assert not found & {"torch", *HEAVY}


TRACEBACK_IN_A_CYCLE = """
def probe():
    try:
        raise ImportError
    except ImportError as error:
        kept = error
probe()
"""


def test_a_large_import_keeps_nothing_of_its_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probing_module.py").write_text(TRACEBACK_IN_A_CYCLE)
    monkeypatch.syspath_prepend(tmp_path)

    class Local:
        pass

    def caller() -> weakref.ref[Local]:
        import_large("probing_module")
        local = Local()  # as a model that is loaded next
        return weakref.ref(local)

    try:
        assert caller()() is None
    finally:
        gc.unfreeze()


def test_what_a_large_import_brings_is_not_searched_for_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "import gc\nenabled = gc.isenabled()\nmade = [[] for _ in range(1000)]\n"
    (tmp_path / "large_module.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    frozen = gc.get_freeze_count()
    try:
        imported = import_large("large_module")
        assert not imported.enabled
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen + 1000
        assert import_large("large_module") is imported
    finally:
        gc.unfreeze()
