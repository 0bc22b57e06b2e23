"""A digest of LoRA factors: policies with equal digests are equal, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def lora_digest(factors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, over name, shape and little-endian float32 bytes of each factor, in name order.

    Raises ValueError if a factor is not float32, or if there are none.
    """
    if not factors:
        raise ValueError("no factors to digest")
    digest = hashlib.sha256()
    for name in sorted(factors):
        factor = factors[name].detach()
        if factor.dtype != torch.float32:
            raise ValueError(f"factor {name} is {factor.dtype}, not float32")
        shape = ",".join(str(size) for size in factor.shape)
        digest.update(f"{name} {shape}\n".encode())
        digest.update(factor.cpu().contiguous().numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()
