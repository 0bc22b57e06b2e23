"""Storage of quantised weights, by format. All weights are quantised here, by `pack`.

=============  =========================================================================================
``nvfp4``      ``packed`` uint8 [out, K/2], ``scales`` uint8 [out, K/16], ``amax`` float32 []: see
               `nvfp4.NVFP4Tensor`; K is `in` padded to a multiple of 32, the scales are not swizzled
``fp8-row``    ``codes`` uint8 [out, in], the bits of E4M3 values, ``scale`` float32 [out]: see `fp8`
=============  =========================================================================================

All arithmetic is elementwise and correctly rounded, so a weight has the same bits on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from solrl_ray.quantization import fp8, nvfp4
from solrl_ray.quantization.planning import Format

TENSORS: dict[Format, tuple[str, ...]] = {"nvfp4": ("packed", "scales", "amax"), "fp8-row": ("codes", "scale")}
"""Format → names of its tensors; the first one has one row per output feature."""
HEADROOM = 1.5
"""The frozen amax of an NVFP4 weight is this times the amax of its base. The headroom costs no accuracy."""


def frozen_amax(base: Tensor) -> float:
    """The amax that fixes a weight's global scale in every revision: 1.5 · max |W| of the bfloat16 base.

    With a fixed scale, unchanged weights keep their codes in the next revision.

    Raises ValueError if the weight has NaN or Inf.
    """
    amax = base.detach().to(torch.bfloat16).abs().max().float()
    if not torch.isfinite(amax):
        raise ValueError(f"cannot quantise a weight whose amax is {float(amax)}")
    return float(HEADROOM * amax)


def pack(format: Format, weight: Tensor, amax: float | None = None, *, finite: bool = False) -> dict[str, Tensor]:
    """Quantise a weight [out, in] to `format`, on its device; returns the content of `QuantizedLinear.tensors`.

    Args:
        weight: any float type; rounded to bfloat16 first.
        amax: fixes the global scale (`frozen_amax`), for ``nvfp4`` only; None uses max |W|.
        finite: True if the caller knows that the weight is finite. This skips a check that waits for the GPU.

    Raises ValueError if the weight has NaN or Inf.
    """
    rows = weight.detach().to(torch.bfloat16).float()
    if format == "nvfp4":
        packed = nvfp4.quantize(nvfp4.pad_columns(rows), amax)
        return {"packed": packed.packed, "scales": packed.scales, "amax": packed.amax}
    if not finite and not bool(torch.isfinite(rows).all()):
        raise ValueError(f"cannot quantise a weight whose amax is {float(rows.abs().max())}")
    codes, scale = fp8.quantize_rows(rows)
    return {"codes": codes.view(torch.uint8), "scale": scale.squeeze(1)}
