"""On two GPUs: a rank whose peer dies leaves the collective that it waits in, and learns on in another group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from solrl_ray.config.schema import LearnerConfig
from solrl_ray.errors import PeerGone
from solrl_ray.learning.collectives import Collectives
from solrl_ray.learning.engine import Engine, free_port, leave_process_group, process_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]


def rank(own: int, port: int, result: Path, how: str) -> None:
    device = torch.device("cuda")
    join = partial(process_group, device=device, timeout=60.0, one_host=True)
    join(own, 2, "127.0.0.1", port)
    collectives = Collectives(own, device)
    weight = torch.nn.Parameter(torch.ones(1 << 20, device=device))
    engine = engine_of(weight)
    step(engine, device)
    if own == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if own == 1:  # NCCL sees nothing of this: its kernel on the other GPU waits for a call that never comes
        time.sleep(40)
        os._exit(0)
    began = time.monotonic()
    abort = threading.Timer(3.0, collectives.abort)  # as the controller has it
    abort.start()
    with pytest.raises(PeerGone):
        finished_step(collectives, engine, device)
    seconds = time.monotonic() - began
    abort.join()
    collectives.close()
    engine.close()
    leave_process_group()
    join(0, 1, "127.0.0.1", free_port())
    weight.data.fill_(1.0)
    engine = engine_of(weight)
    step(engine, device)
    result.write_text(json.dumps({"seconds": seconds, "alone": [weight.min().item(), weight.max().item()]}))
    engine.close()
    leave_process_group()


def engine_of(weight: torch.nn.Parameter) -> Engine:
    return Engine.build(LearnerConfig(), [weight], lambda scale: weight * scale)


def step(engine: Engine, device: torch.device) -> None:
    engine.backward(engine.velocity(torch.ones(1, device=device)).sum(), last=True)
    engine.step(0.125)


def finished_step(collectives: Collectives, engine: Engine, device: torch.device) -> None:
    with collectives.watched():
        step(engine, device)  # makes a number that is of no use, or an error
        torch.cuda.synchronize()


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_leaves_the_collective_in_which_it_waits_for_another_one(tmp_path: Path, how: str) -> None:
    port, result = free_port(), tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.gpu.test_lost_rank", str(port), str(result), how]
    ranks = [
        subprocess.Popen([*command, str(own)], env=os.environ | {"CUDA_VISIBLE_DEVICES": str(own)}) for own in (0, 1)
    ]
    try:
        codes = [process.wait(150) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, -signal.SIGKILL if how == "dies" else 0]
    told = json.loads(result.read_text())
    assert told["seconds"] < 30
    # AdamW's first step moves each weight by the learning rate, and decays it by 1e-4 of that.
    assert told["alone"] == pytest.approx([0.875] * 2, abs=1e-4)
    print(f"one {how}: left after {told['seconds']:.2f} s")


if __name__ == "__main__":
    rank(int(sys.argv[4]), int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
