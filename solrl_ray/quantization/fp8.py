"""FP8 with one scale per row: the format of tier ``fp8``.

A value is stored as ``e4m3 · scale``. The scale is the smallest power of two that brings the row's largest magnitude to
at most 448. E4M3 is a floating-point format, so a power of two is as accurate as an exactly fitting scale, and scaling
by it is exact. The only rounding is E4M3's, whatever the device or compiler. An unchanged weight keeps its code unless
its row outgrows its power of two.

FP8 is closer to bfloat16 than NVFP4 is. It is never called NVFP4.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUND_UP = 0x1FFFFF
"""Added to a float32's bits, this carries into the exponent if the mantissa is above 1.75 = 448 / 2^8."""
_EXPONENT = 0x7F800000
_SMALLEST = 0x0D000000
"""Bits of 2^-101, the smallest scale, also used for rows of zeros. Its inverse is far from overflow."""


def row_scale(x: Tensor) -> Tensor:
    """The scale of each row: x float32 [..., K] → float32 [..., 1], powers of two; NaN for a row with NaN or Inf."""
    amax = x.abs().amax(dim=-1, keepdim=True)
    exponent = (amax.view(torch.int32) + _ROUND_UP) & _EXPONENT
    scale = (exponent - (8 << 23)).clamp(min=_SMALLEST).view(torch.float32)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x float32 [M, K] → E4M3 codes [M, K] and scales float32 [M, 1]. A row with NaN or Inf has scale NaN."""
    scale = row_scale(x)
    # 1 / 2^e in integer arithmetic, which is exact; a compiled division may not be.
    inverse = ((254 << 23) - scale.view(torch.int32)).view(torch.float32)
    return (x * inverse).to(torch.float8_e4m3fn), scale
