"""One of the misbehaviours of `make chaos-network`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from solrl_ray.config.schema import Config
from tests.chaos import switch
from tests.support.documents import ROOT
from tests.support.patience import patience
from tests.support.small import digests


@pytest.mark.slow
def test_a_run_whose_node_hears_nothing_for_a_while_ends_with_the_bytes_of_one_machine(
    calm: Config, tmp_path: Path
) -> None:
    if why := switch.why_not():
        pytest.skip(why)
    command = [sys.executable, "-m", "tests.chaos.network", "one-way", "--root", str(tmp_path / "machines")]
    done = subprocess.run(
        [*command, "--digests", *digests(calm)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(600.0),
        check=False,
    )
    said = [file.read_text() for file in (tmp_path / "machines").glob("*.log")]
    assert done.returncode == 0, "\n".join([done.stdout + done.stderr, *said])
