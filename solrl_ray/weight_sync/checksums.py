"""Checksums of tensors: a CRC-32C each, and one SHA-256 over those.

CRC-32C runs at memory speed, on a GPU without copying (`crc_kernel`), so that a worker can verify gigabytes of weights
in every iteration. It detects accidents, not forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import google_crc32c
import numpy as np
import torch
from pydantic import BeforeValidator, PlainSerializer

from solrl_ray.common.safetensors_file import NAMES

WAITING_BYTES = 1 << 28
"""On a GPU, tensors of about so many bytes are kept until one launch reads them."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The required type, shape and checksum of a tensor."""

    dtype: str
    """safetensors' name: ``F32``, ``U8``, …"""
    shape: tuple[int, ...]
    crc32c: Annotated[int, BeforeValidator(partial(int, base=16)), PlainSerializer("{:08x}".format)]
    """CRC-32C (Castagnoli, RFC 3720 appendix B.4) over the tensor's bytes, row by row, little-endian."""


def stamp(tensor: torch.Tensor) -> Stamp:
    """The stamp of a tensor's present content, on any device."""
    return stamps({"": tensor})[""]


def stamps(tensors: Mapping[str, torch.Tensor]) -> dict[str, Stamp]:
    """`stamp` of each tensor; waits for a GPU once."""
    collector = Stamps()
    collector.add(tensors)
    return collector.result()


class Stamps:
    """Stamps of tensors that come one after another: a GPU has few launches to do, and is waited for at the end."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._crcs: dict[str, int] = {}
        self._waiting: dict[str, torch.Tensor] = {}
        """On a GPU, not yet read there."""
        self._sizes: dict[str, int] = {}
        """Bytes, of those that are read on a GPU."""
        self._folded: list[torch.Tensor] = []
        """What the kernel left of them for the last step."""

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The tensors must not change before `result`."""
        for name, tensor in tensors.items():
            self._kinds[name] = NAMES[tensor.dtype], tuple(tensor.shape)
            contiguous = tensor.detach().contiguous()
            if not tensor.is_cuda or not _kernel().fits(contiguous):
                self._crcs[name] = int(google_crc32c.value(raw_bytes(contiguous)))
                continue
            self._waiting[name], self._sizes[name] = contiguous, tensor.nbytes
        if sum(tensor.nbytes for tensor in self._waiting.values()) > WAITING_BYTES:
            self._fold()

    def _fold(self) -> None:
        self._folded.append(_kernel().folded(list(self._waiting.values())))
        self._waiting = {}

    def result(self) -> dict[str, Stamp]:
        if self._waiting:
            self._fold()
        if self._folded:
            crcs = _kernel().crcs(self._folded, list(self._sizes.values()))
            self._crcs |= dict(zip(self._sizes, crcs, strict=True))
        return {name: Stamp(*kind, self._crcs[name]) for name, kind in self._kinds.items()}


def _kernel() -> Any:
    from solrl_ray.weight_sync import crc_kernel  # CUDA comes with Triton

    return crc_kernel


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, uint8 [n]; a view where the tensor is contiguous and on the CPU."""
    array: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def stamps_digest(stated: Mapping[str, Stamp]) -> str:
    """SHA-256, in hex, over the line ``<name> <dtype> <shape> <crc32c>`` of each tensor, in name order.

    The shape is written ``4,48``, the CRC as eight hex digits.
    """
    lines = [
        f"{name} {stamp.dtype} {','.join(map(str, stamp.shape))} {stamp.crc32c:08x}\n"
        for name, stamp in sorted(stated.items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """`stamps_digest` of the tensors' present content."""
    return stamps_digest(stamps(tensors))
