"""Prepares an actor's process: device, threads, memory allocator, deterministic kernels."""

from __future__ import annotations

import ctypes
import gc
import os

import torch
import torch.utils.deterministic

from solrl_ray.config.fleet import WorkerResources
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import UserError
from solrl_ray.planning.fitting import Gpu
from solrl_ray.quantization import capability
from solrl_ray.quantization.scope import UNQUANTIZED_TIERS

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``, from ``malloc.h``."""
_MIB = 2**20


def device_of(num_gpus: float) -> torch.device:
    """The first GPU that Ray assigned if the actor requested any fraction of one, else the CPU."""
    return torch.device("cuda", 0) if num_gpus > 0 else torch.device("cpu")


def prepare(worker: WorkerResources, *, deterministic: bool) -> torch.device:
    """Set this process's number of threads and its kernels, which are part of the score class; returns its device."""
    torch.set_num_threads(worker.threads)
    device = device_of(worker.num_gpus)
    if device.type == "cpu":
        keep_freed_memory()
    elif deterministic:
        use_deterministic_kernels()
    return device


def keep_freed_memory() -> None:
    """Make glibc keep up to 256 MiB of freed memory instead of returning it to the system.

    Otherwise every activation of a forward pass gets new pages, which the kernel zeroes one by one: 10 to 20 % of a
    sampler's time. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # the highest value that every glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 256 * _MIB)


def use_deterministic_kernels() -> None:
    """Use only kernels that give the same bits every time. An operation without such a kernel raises an error.

    `torch._inductor` then also stops choosing reductions by their timing. Call before CUDA is used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no code reads memory that it has not written
    torch.backends.cudnn.benchmark = False


def free_cache() -> int:
    """Release PyTorch's cached GPU memory; returns the number of bytes released, 0 on a CPU."""
    if not torch.cuda.is_initialized():
        return 0
    gc.collect()
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved()


def card() -> Gpu:
    """Name and memory of this process's first GPU."""
    device = torch.device("cuda", 0)
    memory = torch.cuda.get_device_properties(device).total_memory
    return Gpu(name=capability.device_name(device), memory=memory)


def settle_tier(config: Config, explorer: WorkerResources) -> tuple[str, str]:
    """Resolve the precision tier of exploring on an explorer's device. Must run in a process that has this device.

    Returns:
        The tier and the name of the device.

    Raises UserError: the device cannot run the tier.
    """
    device = device_of(explorer.num_gpus)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "explorers request a GPU (fleet.explorers.num_gpus), but PyTorch finds none on their node; set it to 0 to "
            "use CPUs"
        )
    tier = capability.resolve(pool_sampling(config).tier, device, config.model.dtype)
    if tier not in UNQUANTIZED_TIERS:
        capability.check(tier, device)
    return tier, capability.device_name(device)
