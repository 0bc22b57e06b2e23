"""What a process imports before it knows what it has to do: seconds of every start, and of every replacement."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from solrl_ray.importing import import_large

HEAVY = {"torch._dynamo", "transformers", "diffusers", "peft", "deepspeed", "accelerate", "matplotlib", "tensorboard"}


def imported(*modules: str) -> set[str]:
    """Names in `sys.modules` of a new interpreter that has imported `modules`."""
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_controller_driver_and_workers_import_no_model_library_before_they_start() -> None:
    """The controller imports every role's module, because it makes the actors."""
    found = imported("actors.commands", "actors.packer", "actors.scorer")
    assert {"actors.controller", "actors.explorer", "actors.selector", "actors.learner", "torch"} <= found
    assert not found & HEAVY


def test_commands_that_compute_nothing_do_without_torch() -> None:
    found = imported("solrl_ray.cli", "solrl_ray.scheduling.placement", "actors.jobs")
    assert not found & {"torch", *HEAVY}
    assert not imported("solrl_ray.cli") & {"torch", "ray", "numpy"}


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
