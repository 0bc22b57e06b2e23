"""On two GPUs: a rank whose peer dies leaves the collective that it hangs in, and can join another group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from solrl_ray.learning.engine import abort_process_group, free_port, leave_process_group, process_group
from solrl_ray.learning.peer_watch import PeerWatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]


def rank(own: int, port: int, result: Path) -> None:
    device = torch.device("cuda")
    join = partial(process_group, device=device, timeout=60.0, one_host=True)
    join(own, 2, "127.0.0.1", port)
    watch = PeerWatch(own, 2, "127.0.0.1", device, 60.0, partial(abort_process_group, device))
    groups = torch.distributed.group.WORLD, torch.distributed.new_group([0, 1])  # DeepSpeed has one of its own as well
    numbers = torch.ones(1 << 20, device=device)
    for group in groups:
        torch.distributed.all_reduce(numbers, group=group)
    assert float(numbers[0]) == 4.0
    if own == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    torch.distributed.all_reduce(numbers, group=groups[1])
    float(numbers[0])  # waits for the GPU; the value is of no use
    seconds = time.monotonic() - began
    with pytest.raises(Exception, match=r".+"):
        torch.distributed.all_reduce(numbers)
    watch.close()
    leave_process_group()
    join(0, 1, "127.0.0.1", free_port())
    alone = torch.full((4,), 3.0, device=device)
    torch.distributed.all_reduce(alone)
    result.write_text(json.dumps({"seconds": seconds, "alone": alone.tolist()}))
    leave_process_group()


def test_a_rank_leaves_the_collective_in_which_it_waits_for_a_dead_one(tmp_path: Path) -> None:
    port, result = free_port(), tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.gpu.test_lost_rank", str(port), str(result)]
    ranks = [
        subprocess.Popen([*command, str(own)], env=os.environ | {"CUDA_VISIBLE_DEVICES": str(own)}) for own in (0, 1)
    ]
    try:
        codes = [process.wait(150) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, -signal.SIGKILL]
    told = json.loads(result.read_text())
    assert told["seconds"] < 30
    assert told["alone"] == [3.0] * 4
    print(f"left after {told['seconds']:.2f} s")


if __name__ == "__main__":
    rank(int(sys.argv[3]), int(sys.argv[1]), Path(sys.argv[2]))
