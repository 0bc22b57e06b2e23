"""Messages between Ray's processes are lost on purpose; the run ends with the bytes of an undisturbed one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from solrl_ray.config.schema import Config
from tests.support.forkserver import solrl
from tests.support.patience import patience
from tests.support.small import digests, folder, small_config

ATTEMPTS = 6
CALLS = "CoreWorkerService.grpc_client.PushTask"
"""Calls of actors' methods. Ray repeats none of ours, so each that is lost costs who was called."""
INJECTED = re.compile(r"Inject RPC (?:request|response) failure.* for ([\w:.]+)")


def fault(number: int, percent: int) -> dict[str, int]:
    """At most `number` in each process; each request and each answer is lost with this probability."""
    return {
        "num_failures": number,
        "req_failure_prob": percent,
        "resp_failure_prob": percent,
        "in_flight_failure_prob": 0,
    }


FAULTS = {
    CALLS: fault(2, 2),
    "CoreWorkerService.grpc_client.GetObjectStatus": fault(5, 20),
    "NodeManagerService.grpc_client.RequestWorkerLease": fault(3, 20),
    "NodeManagerService.grpc_client.PinObjectIDs": fault(3, 20),
    "ray::rpc::InternalKVGcsService.grpc_client.InternalKVGet": fault(3, 20),
    "ray::rpc::ActorInfoGcsService.grpc_client.RegisterActor": fault(3, 20),
    "ray::rpc::ActorInfoGcsService.grpc_client.KillActorViaGcs": fault(3, 20),
    "ray::rpc::WorkerInfoGcsService.grpc_client.ReportWorkerFailure": fault(3, 20),
}


@pytest.fixture
def place() -> Iterator[Path]:
    """Folder of Ray's logs and sockets; short, because a socket's path is."""
    made = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.usefixtures("forked_workers")
def test_lost_messages_cost_time_and_no_bytes(calm: Config, forks: str, tmp_path: Path, place: Path) -> None:
    stored = str(folder(calm) / "config.yaml")
    command = solrl(forks, "train", stored, "--continue", "--no-live")
    command += ["--set", f"run.root='{tmp_path}'", "--set", "run.name=faulty", "--set", "fleet.max_replacements=50"]
    faults = {"RAY_testing_rpc_failure": json.dumps(FAULTS), "RAY_TMPDIR": str(place), "RAY_AUTH_MODE": "disabled"}
    said = []
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            command, env=os.environ | faults, capture_output=True, text=True, timeout=patience(250.0), check=False
        )
        if done.returncode == 0:
            break
        said.append(done.stderr.strip().splitlines()[-1])
        assert re.match(r"error: .*(failed|is gone|lost|could not be joined|did not start)", said[-1]), done.stderr
    assert done.returncode == 0, said
    assert digests(small_config(tmp_path, "faulty")) == digests(calm)
    lost = Counter(name for log in place.rglob("*.log") for name in INJECTED.findall(log.read_text(errors="replace")))
    assert lost[CALLS] >= 1
    assert lost.keys() - {CALLS}
