"""deploy/slurm/train.sbatch: the commands that it composes, with stand-ins for Slurm that print their arguments."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.support.processes import output_of

ROOT = Path(__file__).parents[3]


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_every_node_joins_the_first_with_one_token_and_the_run_is_begun_or_resumed(tmp_path: Path) -> None:
    program(tmp_path, "scontrol", 'echo "n7\nn8"')
    program(tmp_path, "srun", 'echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN"; echo "$@"')
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "32",
    }
    script = ROOT / "deploy" / "slurm" / "train.sbatch"
    command = ["bash", script, "flux1_dev_eight_gpus", "--set", "run.root=/shared/runs"]
    token, called = output_of(*command, **variables).splitlines()
    assert re.fullmatch(r"token [0-9a-f]{64}", token)
    ray, run = called.split(" -- ")
    assert ray.split()[1:3] == [".venv/bin/ray", "symmetric-run"]
    assert "--address n7:6379 --min-nodes 2 --num-cpus 32" in ray
    assert run == (
        ".venv/bin/python -m solrl_ray train --address n7:6379 --continue --no-live "
        "flux1_dev_eight_gpus --set run.root=/shared/runs"
    )
    known = output_of(Path(sys.executable).parent / "ray", "symmetric-run", "--help")
    assert all(option in known for option in re.findall(r"--\w[\w-]*", ray.partition("symmetric-run")[2]))
