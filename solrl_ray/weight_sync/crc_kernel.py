"""CRC-32C of tensors on their CUDA device, without copying gigabytes of weights to the host.

CRC-32C is linear over GF(2), so many lanes can read a buffer at once. 32-bit words are assigned in turn: a lane folds
every LANES-th word, and its result is advanced by as many words as follow its last one::

    words    0 1 2 … | LANES … | …                 zeros before the first word change nothing, so rows are filled up
    lane i   state ← advance(LANES words, state) ^ word
    raw      advance(LANES - i words, state of lane i), all lanes xored
    crc      raw ^ advance(all bytes, 0xFFFFFFFF) ^ 0xFFFFFFFF

"Advance by n words" is the effect of n zero words on a CRC's register: a 32 × 32 matrix over GF(2), here 32 columns of
uint32. One launch for many tensors; a few numbers of each come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, bits reflected."""
LANES = 1 << 16
BLOCK = 1024
ONES = 0xFFFFFFFF


def fits(tensor: torch.Tensor) -> bool:
    """Whether `folded` can take a tensor: contiguous, and its bytes are whole words."""
    return bool(tensor.is_contiguous() and tensor.nbytes and not (tensor.nbytes % 4 or tensor.data_ptr() % 4))


def folded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Part of the CRC-32C of each tensor's bytes, for `crcs`: int32 [tensors, …]. All are on one CUDA device."""
    device = tensors[0].device
    advance, lanes = _tables(device)
    rows = [[each.data_ptr(), each.nbytes // 4] for each in tensors]
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    parts = torch.empty((len(tensors), LANES // BLOCK), dtype=torch.int32, device=device)
    with torch.cuda.device(tensors[0].get_device()):
        _fold[(LANES // BLOCK, len(tensors))](table, advance, lanes, parts, LANES, BLOCK)
    return parts


def crcs(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[int]:
    """CRC-32C of tensors, from what `folded` gave of them and their numbers of bytes. Waits for the device once."""
    found = torch.cat(list(parts)).cpu().numpy().view(np.uint32)
    folds = np.bitwise_xor.reduce(found, axis=1)
    return [int(fold) ^ int(_start(size)) for fold, size in zip(folds, sizes, strict=True)]


@triton.jit  # type: ignore[untyped-decorator]
def _fold(table, advance, lanes, parts, LANES, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tensor, block = tl.program_id(1), tl.program_id(0)
    words = tl.load(table + 2 * tensor).to(tl.pointer_type(tl.int32))
    count = tl.load(table + 2 * tensor + 1)
    rows = (count + LANES - 1) // LANES
    lane = block * BLOCK + tl.arange(0, BLOCK)
    start = lane - (rows * LANES - count)
    state = tl.zeros((BLOCK,), dtype=tl.uint32)
    for row in range(rows):
        index = row * LANES + start
        word = tl.load(words + index, mask=index >= 0, other=0).to(tl.uint32, bitcast=True)
        low = tl.load(advance + (state & 255)) ^ tl.load(advance + 256 + ((state >> 8) & 255))
        high = tl.load(advance + 512 + ((state >> 16) & 255)) ^ tl.load(advance + 768 + (state >> 24))
        state = (low ^ high).to(tl.uint32, bitcast=True) ^ word
    folded = tl.zeros((BLOCK,), dtype=tl.int32)
    for bit in range(32):
        column = tl.load(lanes + bit * LANES + lane)
        folded ^= tl.where(((state >> bit) & 1) != 0, column, 0)
    tl.store(parts + tensor * (LANES // BLOCK) + block, tl.xor_sum(folded, axis=0))


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance by LANES words, byte by byte [4 · 256]; and the columns of each lane's own distance [32 · LANES]."""
    distances = advances(LANES)
    return _on(device, byte_tables(distances[-1])), _on(device, distances[::-1].T)


def _on(device: torch.device, numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers).reshape(-1).view(np.int32).copy()).to(device)


@lru_cache(maxsize=64)
def _start(count: int) -> np.uint32:
    """The part of the register's initial value, all ones, and the final inversion in the CRC of `count` bytes."""
    return np.uint32(apply(power(_byte(), count), np.array([ONES], np.uint32))[0] ^ np.uint32(ONES))


def _byte() -> np.ndarray:
    """Advance by one zero byte: columns uint32 [32]."""
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(8):
        columns = (columns >> np.uint32(1)) ^ np.where(columns & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    return columns


def advances(count: int) -> np.ndarray:
    """Advance by 1, 2, …, `count` words (a power of two): columns uint32 [count, 32]."""
    found = power(_byte(), 4)[None]
    while len(found) < count:
        found = np.concatenate([found, apply(found[-1], found)])
    return found


def byte_tables(matrix: np.ndarray) -> np.ndarray:
    """A matrix applied to each value of each of a word's four bytes, lowest first: uint32 [4, 256]."""
    values = np.arange(256, dtype=np.uint32)
    return np.stack([apply(matrix, values << np.uint32(8 * place)) for place in range(4)])


def power(matrix: np.ndarray, exponent: int) -> np.ndarray:
    result = np.uint32(1) << np.arange(32, dtype=np.uint32)
    while exponent:
        if exponent & 1:
            result = apply(matrix, result)
        matrix, exponent = apply(matrix, matrix), exponent >> 1
    return result


def apply(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A matrix, as columns uint32 [32], times vectors uint32 of any shape."""
    result = np.zeros_like(values)
    for bit in range(32):
        result ^= np.where((values >> np.uint32(bit)) & np.uint32(1), matrix[bit], np.uint32(0))
    return result
