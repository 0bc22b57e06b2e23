"""The CUDA kernels of publishing, in Triton's interpreter: the bits of what runs on a CPU."""

import os
import subprocess
import sys

import google_crc32c
import numpy as np
import pytest

pytest.importorskip("triton")

INTERPRETED = """
import google_crc32c
import torch
from solrl_ray.policy import merge, merge_kernel
from solrl_ray.weight_sync import crc_kernel

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

crc_kernel.LANES, crc_kernel.BLOCK = 512, 256  # the interpreter takes its time
contents = []
for size in (4, 400, crc_kernel.LANES * 4, crc_kernel.LANES * 4 + 44):
    content = (torch.arange(size) * 37 % 251).to(torch.uint8)
    contents.append(content)
assert all(crc_kernel.fits(content) for content in contents)
found = crc_kernel.crcs([crc_kernel.folded(contents[:3]), crc_kernel.folded(contents[3:])], [len(c) for c in contents])
assert found == [google_crc32c.value(content.numpy()) for content in contents]
assert not crc_kernel.fits(torch.zeros(6, dtype=torch.uint8))
"""


def test_merge_and_checksum_kernels_give_the_bits_of_the_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_advancing_a_register_is_what_zero_words_do_to_it() -> None:
    from solrl_ray.weight_sync import crc_kernel

    message = b"solrl"
    register = np.array([google_crc32c.value(message) ^ crc_kernel.ONES], np.uint32)
    for words, matrix in enumerate(crc_kernel.advances(8), start=1):
        advanced = int(crc_kernel.apply(matrix, register)[0]) ^ crc_kernel.ONES
        assert advanced == google_crc32c.value(message + bytes(4 * words))
