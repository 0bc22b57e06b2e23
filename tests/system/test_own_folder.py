"""A folder with files named like modules of Python and of libraries, and a reward there that starts processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.documents import ROOT
from tests.support.patience import patience

REWARD = """
from multiprocessing import get_context
from beside import mean

def scores(images, prompts):
    found = [mean(image) for image in images.numpy()]
    for method in ("fork", "spawn"):
        with get_context(method).Pool(1) as pool:
            assert pool.map_async(mean, images.numpy()).get(60) == found
    return found
"""
DRIVER = """
import ray
from actors.client import launch
from actors.client.connect import joined
from solrl_ray.config.loading import load
from solrl_ray.config.own_functions import attached

def places():
    import random, safetensors, statistics
    return [module.__file__ for module in (random, safetensors, statistics)]

def main():
    with joined(None):
        print(*ray.get(ray.remote(places).remote()), sep="\\n")
        launch.try_own_rewards(attached(load([{demo!r}], ["rewards=[{{kind: 'mine.py:scores'}}]"])), elsewhere=True)
        print("scored")

if __name__ == "__main__":
    main()
"""


def test_workers_import_no_file_of_the_users_folder_by_chance_and_a_reward_there_may_start_processes(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("statistics", "safetensors", "random"):
        (here / f"{name}.py").write_text("raise SystemError('imported by chance')\n")
    (here / "mine.py").write_text(REWARD)
    (here / "beside.py").write_text("def mean(image):\n    return float(image.mean())\n")
    (tmp_path / "driver.py").write_text(DRIVER.format(demo=str(ROOT / "configs" / "demo.yaml")))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "driver.py")],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(240.0),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scored" in done.stdout
    assert str(here) not in done.stdout
