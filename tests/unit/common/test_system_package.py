"""A user's folder with a package called `actors`, as this installation's second package is called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from solrl_ray.common import system_package
from tests.support.processes import python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with packages that refuse to be imported."""
    for name in ("actors", "tests", "configs", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemError('imported by chance')\n")
    return tmp_path


@pytest.mark.parametrize("namespace", [False, True])
def test_the_command_imports_its_own_package_in_such_a_folder(folder: Path, *, namespace: bool) -> None:
    if namespace:
        (folder / "actors" / "__init__.py").unlink()
    ours = str(system_package.FOLDER)
    code = "from solrl_ray.cli import main; main(['list']); from actors.client import launch; print(launch.__file__)"
    said = python("-c", code, cwd=folder, PYTHONPATH=ours)
    assert said.strip().endswith(f"{ours}/actors/client/launch.py")


def test_a_run_is_checked_in_such_a_folder(folder: Path) -> None:
    said = python("-m", "solrl_ray", "train", "demo", "--dry-run", cwd=folder, PYTHONPATH=str(system_package.FOLDER))
    assert "dry run: all checks passed" in said


def test_a_process_that_has_imported_another_one_is_refused(folder: Path) -> None:
    (folder / "actors" / "__init__.py").write_text("")
    code = "import actors, solrl_ray.cli; raise SystemExit(solrl_ray.cli.main(['train', 'demo', '--dry-run']))"
    said = python("-c", code, status=2, cwd=folder, PYTHONPATH=str(system_package.FOLDER))
    assert f"error: The package 'actors' was imported from {folder / 'actors'}, but" in said


def test_such_a_folder_on_the_path_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not system_package.is_shadowed()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert system_package.is_shadowed()
