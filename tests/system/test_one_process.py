"""A campaign's run in one process: the bytes of a run on Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path

from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from tests.support.forkserver import program
from tests.support.made_configs import changed
from tests.support.patience import patience
from tests.support.small import digests

ROOT = Path(__file__).parents[2]


def train(forks: str, config: Config, iterations: int) -> subprocess.CompletedProcess[str]:
    path = Path(config.run.root) / "run.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_yaml(config))
    command = program(forks, "benchmarks/one_process.py", str(path), "--set", f"run.iterations={iterations}")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(300.0))


def test_a_run_in_one_process_ends_with_the_bytes_of_one_on_ray(calm: Config, forks: str, tmp_path: Path) -> None:
    config = changed(calm, run={"root": str(tmp_path)})
    done = train(forks, config, calm.run.iterations)
    assert done.returncode == 0, done.stderr
    assert digests(config) == digests(calm)
    refused = train(forks, changed(config, rollout={"keep": 2}), calm.run.iterations)
    assert refused.returncode == 2
    assert "rollout.keep is 2 " in refused.stderr
    assert "was begun with 4; a resumed run may change only" in refused.stderr
