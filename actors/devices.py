"""Which device an actor computes on, and with how many threads."""

from __future__ import annotations

import torch

from solrl_ray.config.schema import Worker


def device_of(num_gpus: float) -> torch.device:
    """The first GPU that Ray granted to this actor if it asked for a share of one, else the CPU."""
    return torch.device("cuda", 0) if num_gpus > 0 else torch.device("cpu")


def prepare(worker: Worker) -> torch.device:
    """Fix this process's threads, which are part of the score class, and return its device."""
    torch.set_num_threads(worker.threads)
    return device_of(worker.num_gpus)
