"""`merge.merged_weight` as one CUDA kernel: the same sums in the same order, so the same bits.

The float64 sums stay in registers, because the GPU's cache could not hold them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 16, 128


def merged_weight(base: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """`merge.merged_weight` for tensors on one CUDA device. Arguments are checked by the caller, `merge`."""
    base, bfloat16 = base.contiguous(), base.dtype == torch.bfloat16
    rows, columns = base.shape
    merged = torch.empty_like(base)
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))
    with torch.cuda.device(base.get_device()):
        _merge[grid](
            base,
            lora_a.contiguous(),
            lora_b.contiguous(),
            _factor(scaling, base.device),
            merged.view(torch.int16) if bfloat16 else merged,
            rows,
            columns,
            lora_a.shape[0],
            bfloat16,
            ROWS,
            COLUMNS,
            enable_fp_fusion=False,  # total · scaling + base has two roundings
        )
    return merged


@lru_cache(maxsize=16)
def _factor(scaling: float, device: torch.device) -> Tensor:
    """The scaling as a float64 tensor on the device: Triton would pass a Python number as float32.

    Cached, because the transfer waits for the device.
    """
    return torch.tensor([scaling], dtype=torch.float64, device=device)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    base, a, b, factor, merged, rows, columns, rank, BFLOAT16: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float64)
    for r in range(rank):
        left = tl.load(b + row * rank + r, mask=row < rows, other=0.0).to(tl.float64)
        right = tl.load(a + r * columns + column, mask=column < columns, other=0.0).to(tl.float64)
        total += left[:, None] * right[None, :]
    offset = row[:, None].to(tl.int64) * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    total = total * tl.load(factor) + tl.load(base + offset, mask=inside, other=0.0).to(tl.float64)
    nearest = total.to(tl.float32)
    if BFLOAT16:  # as `merge.round_once`: first to odd, then to even, in integer arithmetic
        widened = nearest.to(tl.float64)
        bits = nearest.to(tl.uint32, bitcast=True)
        towards_zero = bits - (tl.abs(widened) > tl.abs(total)).to(tl.uint32)
        odd = tl.where(widened == total, bits, towards_zero | 1)
        even = (odd + 0x7FFF + ((odd >> 16) & 1)) >> 16
        result = tl.where(total != total, 0x7FC0, even)
        tl.store(merged + offset, result.to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)
    else:
        tl.store(merged + offset, nearest, mask=inside)
