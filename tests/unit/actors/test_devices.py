"""What a process settles before it computes, and who takes turns on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from actors.workers.devices import prepare, settle_tier
from solrl_ray.config.fleet import WorkerResources
from solrl_ray.errors import UserError
from tests.support import made_runs


def test_a_tier_that_the_device_lacks_is_refused_before_the_run_begins() -> None:
    config = made_runs.config()
    assert settle_tier(config, config.fleet.explorers)[0] == "nvfp4-emulated"
    with pytest.raises(UserError, match="the preview tier fp8 does not run on cpu"):
        settle_tier(config.changed({"rollout.explore.precision": "fp8"}), config.fleet.explorers)


def test_a_cpu_needs_no_other_kernels_for_the_same_bits() -> None:
    threads = torch.get_num_threads()
    assert prepare(WorkerResources(threads=threads), deterministic=True) == torch.device("cpu")
    assert not torch.are_deterministic_algorithms_enabled()


NEW_PAGES = """
import ctypes, resource
from actors.workers.devices import prepare
from solrl_ray.config.fleet import WorkerResources

c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.memset.argtypes, c.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
prepare(WorkerResources(), deterministic=False)
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [c.malloc(16 * 2**20) for _ in range(12)]
    for each in activations:
        c.memset(each, 1, 16 * 2**20)
    for each in reversed(activations):
        c.free(each)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""A process of its own, whose heap is not that of other tests. Prints the new pages that 192 MiB take, 49,152 pages,
after the same memory was freed. Left alone, glibc keeps 64 MiB at most."""


def test_what_a_forward_on_a_cpu_freed_is_there_for_the_next_one() -> None:
    done = subprocess.run([sys.executable, "-c", NEW_PAGES], capture_output=True, text=True, check=True, timeout=600)
    assert int(done.stdout) < 1000
