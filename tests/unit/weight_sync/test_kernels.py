"""The CUDA kernel of publishing, in Triton's interpreter: the bits of what runs on a CPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import torch
from solrl_ray.policy import merge, merge_kernel

def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

def same(base, a, b, scaling):
    expected = merge.merged_weight(base, a, b, scaling)
    found = merge_kernel.merged_weight(base, a, b, scaling)
    assert found.dtype == expected.dtype
    assert torch.equal(found.float().nan_to_num(7.0), expected.float().nan_to_num(7.0))

for dtype in (torch.bfloat16, torch.float32):
    for rows, columns, rank in ((16, 128, 4), (33, 130, 3)):
        base = (0.02 * randn(rows, columns, seed=1)).to(dtype)
        same(base, randn(rank, columns, seed=2), 1e-3 * randn(rows, rank, seed=3), 1.7)
a, b = randn(2, 8, seed=4), randn(4, 2, seed=5)
a[0, 0], a[0, 1], a[0, 2] = float("nan"), float("inf"), 3e38
same(randn(4, 8, seed=6).bfloat16(), a, b * 3e5, 1.7)
"""


def test_the_merge_kernel_gives_the_bits_of_the_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
