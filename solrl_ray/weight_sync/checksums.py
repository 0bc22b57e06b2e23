"""Checksums of tensors: one 64-bit number per tensor, and one SHA-256 over those numbers.

The bytes of a tensor, row by row and padded with zeros, are read as little-endian signed 32-bit words x. Word i is in
column c = i mod 2¹⁴ of row r = i div 2¹⁴::

    checksum = Σ x[i] · w(c) · v(r)   mod 2⁶⁴        w(c) = 1 + 2 π(c),   v(r) = 1 + 2¹⁵ π(r)

π is a permutation of the numbers below 2⁶⁴. The lowest k bits of its value depend only on the lowest k bits of its
argument. Sums and products modulo 2⁶⁴ are exact in any order, so CPUs and GPUs compute the same number.

The checksum detects accidents, not forgery:

- Any single changed word: its weight is odd, so the product changes.
- Any two different words that swapped places, in tensors of less than 16 GiB. Let 2ᵏ ≤ 2³¹ be the largest power of two
  that divides i - j. The weights of i and j differ by an odd multiple of 2 · 2ᵏ. The words do not differ by a multiple
  of 2³². So the product of the two differences is not a multiple of 2⁶⁴.
- Any other change, except by chance. The probability of a miss is about 2⁻⁶³ if a changed word differs in its lowest
  bit. If all changed words differ only in their highest bit, it is 2⁻³², or 2ᵏ⁻³² for a change repeated 2ᵏ words later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from solrl_ray.common.safetensors_file import NAMES

COLUMNS = 1 << 14
MOST_ROWS = 1 << 18
"""Largest number of rows, of 64 KiB each: a tensor of 16 GiB or more has no checksum."""
ROWS_ON_GPU = 1024
"""Rows that a GPU multiplies at once; their products take 128 MiB. A CPU multiplies one row at a time, in its cache."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Type, shape and checksum of a tensor."""

    dtype: str
    """safetensors' name: ``F32``, ``U8``, …"""
    shape: tuple[int, ...]
    checksum: int
    """Checksum of the tensor's bytes, unsigned, 64 bits."""


def stamp(tensor: torch.Tensor) -> Stamp:
    """The stamp of a tensor's current content, on any device."""
    return stamps({"": tensor})[""]


def stamps(tensors: Mapping[str, torch.Tensor]) -> dict[str, Stamp]:
    """`stamp` of each tensor; waits for the GPU only once."""
    collector = Stamps()
    collector.add(tensors)
    return collector.result()


class Stamps:
    """Collects stamps of tensors one after another; waits for the GPU only in `result`."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._checksums: dict[torch.device, dict[str, torch.Tensor]] = {}
        """Device → tensor name → checksum, int64 [] on that device."""

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._kinds[name] = NAMES[tensor.dtype], tuple(tensor.shape)
            self._checksums.setdefault(tensor.device, {})[name] = _checksum(tensor.detach())

    def result(self) -> dict[str, Stamp]:
        found: dict[str, int] = {}
        for checksums in self._checksums.values():
            numbers = torch.stack(list(checksums.values())).cpu().numpy().view(np.uint64)
            found |= zip(checksums, numbers.tolist(), strict=True)
        return {name: Stamp(*kind, found[name]) for name, kind in self._kinds.items()}


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum of a tensor's bytes: int64 [] on its device."""
    words = _words(tensor)
    of_columns, of_rows = _weights(words.device)
    whole = len(words) // COLUMNS
    matrix, tail = words[: whole * COLUMNS].view(whole, COLUMNS), words[whole * COLUMNS :].view(1, -1)
    blocks = [*matrix.split(ROWS_ON_GPU if words.is_cuda else 1), tail]
    rows = torch.cat([(block * of_columns[: block.shape[1]]).sum(1) for block in blocks])
    return (rows * of_rows[: len(rows)]).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as little-endian words, padded with zeros: int32 [n]."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    if content.numel() % 4 or content.data_ptr() % 4:
        content = torch.nn.functional.pad(content, (0, -content.numel() % 4)).clone()
    return content.view(torch.int32)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of columns and rows: int64 [COLUMNS] and [MOST_ROWS] on the device."""
    permuted = _permuted(np.arange(max(COLUMNS, MOST_ROWS), dtype=np.uint64))
    columns = np.uint64(1) + np.uint64(2) * permuted[:COLUMNS]
    rows = np.uint64(1) + np.uint64(2 * COLUMNS) * permuted[:MOST_ROWS]
    return torch.from_numpy(columns.view(np.int64)).to(device), torch.from_numpy(rows.view(np.int64)).to(device)


def _permuted(numbers: np.ndarray) -> np.ndarray:
    """π of each number: uint64, same shape.

    x + (x² | 5) is a permutation of the numbers below any power of two (Klimov and Shamir, "A New Class of Invertible
    Mappings", 2002). So is multiplication by an odd number.
    """
    for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        numbers = numbers * np.uint64(factor)
        numbers = numbers + (numbers * numbers | np.uint64(5))
    return numbers


def stamps_digest(stated: Mapping[str, Stamp]) -> str:
    """SHA-256, in hex, over one line per tensor in name order: ``<name> <dtype> <shape> <checksum>``.

    A shape is written ``4,48``, a checksum as sixteen hex digits.
    """
    lines = [
        f"{name} {stamp.dtype} {','.join(map(str, stamp.shape))} {stamp.checksum:016x}\n"
        for name, stamp in sorted(stated.items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """`stamps_digest` of the tensors' current content."""
    return stamps_digest(stamps(tensors))
