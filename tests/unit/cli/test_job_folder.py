"""What a Ray job's folder, which comes first on the path of all its processes, must not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.cli import preflight
from solrl_ray.config.loading import load
from solrl_ray.errors import UserError
from tests.support.documents import ROOT


@pytest.mark.parametrize("name", ["statistics", "safetensors", "random", "token", "aiohttp"])
def test_a_file_named_like_a_module_that_a_job_needs_is_refused_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = preflight.Run(load([ROOT / "configs" / "demo.yaml"]))
    folder = tmp_path / preflight.JOB_FOLDERS / "_ray_pkg_0123"
    folder.mkdir(parents=True)
    for fine in ("my_rewards", "test", "setup", name):
        (folder / f"{fine}.py").touch()
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=rf"^{name}\.py in the job's folder .* rename it"):
        preflight.names(run)
    (folder / f"{name}.py").unlink()
    preflight.names(run)
    (tmp_path / f"{name}.py").touch()
    monkeypatch.chdir(tmp_path)  # no job: workers have another path
    preflight.names(run)
