"""What a user has who installs the wheel: no checkout, an empty folder, configurations by name."""

from __future__ import annotations

import html
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import patience
from tests.support.small import CONFIGS, SIZES

REPOSITORY = CONFIGS.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package of a wheel, built from what the repository tracks, beside this environment's others."""
    place = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("what the repository tracks is known to git alone")
    wanted = ("solrl_ray/", "actors/", "configs/", "pyproject.toml", "setup.py", "README.md", "LICENSE")
    for name in listed.stdout.split("\0"):
        if name.startswith(wanted) and (REPOSITORY / name).is_file():
            target = place / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, target)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    run([*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(place), str(place / "source")], place)
    [wheel] = place.glob("*.whl")
    run([*pip, "install", "--no-deps", "--target", str(place / "site"), str(wheel)], place)
    return place / "site"


def run(command: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=patience(300.0),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_runs_by_its_name_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    def solrl(*arguments: str) -> str:
        variables = {"PYTHONPATH": str(installed), "RAY_AUTH_MODE": "disabled"}
        return run([sys.executable, str(installed / "bin" / "solrl"), *arguments], tmp_path, **variables)

    shown = [sys.executable, "-c", "import actors, solrl_ray; print(solrl_ray.__file__, actors.__file__)"]
    assert run(shown, tmp_path, PYTHONPATH=str(installed)).count(str(installed)) == 2
    assert "flux1_dev_80gb" in solrl("list")
    assert "23.8 GB of transformer weights" in " ".join(solrl("plan", "-v", "flux1_dev_80gb").split())
    few = ("run.iterations=1", "fleet.placement=colocated")  # processes, each of which imports what a run needs
    sizes = [word for size in (*SIZES, *few) for word in ("--set", size)]
    solrl("train", "demo", "--no-live", *sizes)
    assert json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())["lora_digest"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    page = html.unescape((tmp_path / "runs" / "demo" / "report.html").read_text())
    lines = page.partition("<h2>Use it</h2>")[2].partition("<pre>")[2].partition("</pre>")[0]
    run([sys.executable, "-c", lines], tmp_path)  # as the report shows them
    assert (tmp_path / "image.png").stat().st_size
