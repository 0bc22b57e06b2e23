"""Checksums of tensors: a 64-bit number each, and one SHA-256 over those.

The bytes of a tensor, row by row and filled up with zeros, are little-endian signed words x of 32 bits. Word i stands
in column c = i mod 2¹⁴ of row r = i div 2¹⁴::

    checksum = Σ x[i] · w(c) · v(r)   mod 2⁶⁴        w(c) = 1 + 2 π(c),   v(r) = 1 + 2¹⁵ π(r)

π is a permutation of the numbers below 2⁶⁴ whose lowest k bits depend on the lowest k bits of its argument alone. Sums
and products modulo 2⁶⁴ are exact in any order, so CPUs and GPUs arrive at the same number. It detects accidents, not
forgery:

- any single changed word: its weight is odd, so the product changes;
- any two different words that changed places, in tensors of less than 16 GiB: the weights of i and j differ by an odd
  multiple of 2 · 2ᵏ, where 2ᵏ ≤ 2³¹ is the largest power of two that divides i - j, and the words by no multiple of
  2³², so the product of the differences is no multiple of 2⁶⁴;
- any other change, except by chance: about 2⁻⁶³ if a changed word differs in its lowest bit; if all of them differ in
  their highest bit alone 2⁻³², or 2ᵏ⁻³² for a change that is repeated 2ᵏ words later.
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
"""Of 64 KiB; a tensor of 16 GiB or more has no checksum."""
ROWS_ON_GPU = 1024
"""Rows that a GPU multiplies together; their products take 128 MiB. A CPU does one row, in its cache."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The required type, shape and checksum of a tensor."""

    dtype: str
    """safetensors' name: ``F32``, ``U8``, …"""
    shape: tuple[int, ...]
    checksum: int
    """Of the tensor's bytes, unsigned, 64 bits."""


def stamp(tensor: torch.Tensor) -> Stamp:
    """The stamp of a tensor's present content, on any device."""
    return stamps({"": tensor})[""]


def stamps(tensors: Mapping[str, torch.Tensor]) -> dict[str, Stamp]:
    """`stamp` of each tensor; waits for a GPU once."""
    collector = Stamps()
    collector.add(tensors)
    return collector.result()


class Stamps:
    """Stamps of tensors that come one after another; a GPU is waited for at the end."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._checksums: dict[torch.device, dict[str, torch.Tensor]] = {}
        """By device, on which they are."""

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
    matrix, rest = words[: whole * COLUMNS].view(whole, COLUMNS), words[whole * COLUMNS :].view(1, -1)
    blocks = [*matrix.split(ROWS_ON_GPU if words.is_cuda else 1), rest]
    rows = torch.cat([(block * of_columns[: block.shape[1]]).sum(1) for block in blocks])
    return (rows * of_rows[: len(rows)]).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as little-endian words, filled up with zeros: int32 [n]."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    if content.numel() % 4 or content.data_ptr() % 4:
        content = torch.nn.functional.pad(content, (0, -content.numel() % 4)).clone()
    return content.view(torch.int32)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of columns and of rows: int64 [COLUMNS] and [MOST_ROWS] on the device."""
    places = _permuted(np.arange(max(COLUMNS, MOST_ROWS), dtype=np.uint64))
    columns = np.uint64(1) + np.uint64(2) * places[:COLUMNS]
    rows = np.uint64(1) + np.uint64(2 * COLUMNS) * places[:MOST_ROWS]
    return torch.from_numpy(columns.view(np.int64)).to(device), torch.from_numpy(rows.view(np.int64)).to(device)


def _permuted(numbers: np.ndarray) -> np.ndarray:
    """π: uint64, of the same shape.

    x + (x² | 5) is a permutation of the numbers below any power of two (Klimov and Shamir, "A New Class of Invertible
    Mappings", 2002), and so is a multiple by an odd number.
    """
    for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        numbers = numbers * np.uint64(factor)
        numbers = numbers + (numbers * numbers | np.uint64(5))
    return numbers


def stamps_digest(stated: Mapping[str, Stamp]) -> str:
    """SHA-256, in hex, over the line ``<name> <dtype> <shape> <checksum>`` of each tensor, in name order.

    The shape is written ``4,48``, the checksum as sixteen hex digits.
    """
    lines = [
        f"{name} {stamp.dtype} {','.join(map(str, stamp.shape))} {stamp.checksum:016x}\n"
        for name, stamp in sorted(stated.items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """`stamps_digest` of the tensors' present content."""
    return stamps_digest(stamps(tensors))
