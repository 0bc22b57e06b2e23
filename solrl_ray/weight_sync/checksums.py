"""Checksums of tensors: a CRC-32C each, and one SHA-256 over those.

CRC-32C runs at memory speed, on a GPU without copying (`crc_kernel`), so that a worker can verify gigabytes of weights
in every iteration. It detects accidents, not forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import google_crc32c
import numpy as np
import torch
from pydantic import BeforeValidator, PlainSerializer

from solrl_ray.common.safetensors_file import NAMES


def _as_hex(crc: int) -> str:
    return f"{crc:08x}"


def _from_hex(text: str) -> int:
    return int(text, 16)


@dataclass(frozen=True, slots=True)
class Stamp:
    """The required type, shape and checksum of a tensor."""

    dtype: str
    """safetensors' name: ``F32``, ``U8``, …"""
    shape: tuple[int, ...]
    crc32c: Annotated[int, BeforeValidator(_from_hex), PlainSerializer(_as_hex)]
    """CRC-32C (Castagnoli, RFC 3720 appendix B.4) over the tensor's bytes, row by row, little-endian."""


def stamp(tensor: torch.Tensor) -> Stamp:
    """The stamp of a tensor's present content, on any device."""
    return Stamp(NAMES[tensor.dtype], tuple(tensor.shape), _crc32c(tensor))


def _crc32c(tensor: torch.Tensor) -> int:
    if tensor.is_cuda:
        from solrl_ray.weight_sync import crc_kernel  # CUDA comes with Triton

        found = crc_kernel.crc32c(tensor)
        if found is not None:
            return found
    return int(google_crc32c.value(raw_bytes(tensor)))


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, uint8 [n]; a view where the tensor is contiguous and on the CPU."""
    array: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def stamps_digest(stamps: Mapping[str, Stamp]) -> str:
    """SHA-256, in hex, over the line ``<name> <dtype> <shape> <crc32c>`` of each tensor, in name order.

    The shape is written ``4,48``, the CRC as eight hex digits.
    """
    lines = [
        f"{name} {stamp.dtype} {','.join(map(str, stamp.shape))} {_as_hex(stamp.crc32c)}\n"
        for name, stamp in sorted(stamps.items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """`stamps_digest` of the tensors' present content."""
    return stamps_digest({name: stamp(tensor) for name, tensor in tensors.items()})
