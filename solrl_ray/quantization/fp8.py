"""FP8 with one scale a row: the format of tier ``fp8``.

A value is stored as ``e4m3 · scale``; the scale is the smallest power of two that brings the row's largest magnitude to
at most 448. E4M3 is a floating-point format, so such a scale is as accurate as one that fits exactly, and scaling is
exact. The only rounding is E4M3's, whatever device or compiler divides. An unchanged weight keeps its code unless its
row outgrows its power of two.

FP8 is nearer to bfloat16 than NVFP4 is. It is never called NVFP4.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUND_UP = 0x1FFFFF
"""Added to a float32's bits, it carries into the exponent if the mantissa is above 1.75 = 448 / 2^8."""
_EXPONENT = 0x7F800000
_SMALLEST = 0x0D000000
"""Bits of 2^-101: the scale of zero rows and of even smaller ones; its inverse is far from overflow."""


def row_scale(x: Tensor) -> Tensor:
    """The scale of each row: x [..., K], float32 → float32 [..., 1], powers of two; NaN for a row with NaN or Inf."""
    amax = x.abs().amax(dim=-1, keepdim=True)
    exponent = (amax.view(torch.int32) + _ROUND_UP) & _EXPONENT
    scale = (exponent - (8 << 23)).clamp(min=_SMALLEST).view(torch.float32)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K], float32 → E4M3 codes [M, K] and scales float32 [M, 1]. A row with NaN or Inf has scale NaN."""
    scale = row_scale(x)
    # 1 / 2^e in integers: exact, where a compiled division need not be.
    inverse = ((254 << 23) - scale.view(torch.int32)).view(torch.float32)
    return (x * inverse).to(torch.float8_e4m3fn), scale
