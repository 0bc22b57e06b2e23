"""The NVFP4 number format and its reference quantiser, variant ``te-1d`` (Transformer Engine's arithmetic).

A value is stored as ``e2m1 · block scale · global scale``: a 4-bit E2M1 code, one E4M3 scale per 16 consecutive
elements of a row, and one FP32 scale per tensor. As in Transformer Engine, the tensor's *amax* is stored instead of its
global scale ``amax / 2688`` (2688 = 6 · 448, the largest code times the largest block scale).

The even element of a pair is in the low nibble. The bits of "NVFP4" differ between libraries (ties, tiny blocks, nibble
order), so everything that stores codes also stores `VARIANT`.

Each step is one IEEE float32 operation, rounded to nearest even, in the order of Transformer Engine's kernels. So the
bits do not depend on the device. `vectors.json` in this folder has known answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from solrl_ray.quantization.planning import BLOCK, K_MULTIPLE

VARIANT = "te-1d"
E2M1_MAX = 6.0
E4M3_MAX = 448.0
GLOBAL_RANGE = E2M1_MAX * E4M3_MAX
FLT_MAX = float(np.finfo(np.float32).max)
SIXTH = float(np.float32(1 / 6))
ALPHA_UNIT = float(np.float32(1 / (36 * 448**2)))
"""The product of two tensors is ``amax_a · amax_b · ALPHA_UNIT`` times the product of their operands."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, eq=False)
class NVFP4Tensor:
    """A quantised matrix [M, K]. All tensors are on one device."""

    packed: torch.Tensor
    """uint8 [M, K/2]: byte j holds element 2j in its low and element 2j + 1 in its high nibble."""
    scales: torch.Tensor
    """uint8 [M, K/16]: the bits of the E4M3 block scales, row by row (not swizzled)."""
    amax: torch.Tensor
    """float32 []: the tensor's amax, or the fixed amax it was quantised with."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    def operand(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``e2m1 · block scale``, without the global scale: [M, K] in `dtype`; exact in bfloat16 and float32."""
        rows, columns = self.shape
        table = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=self.packed.device)
        values = table[unpack(self.packed).long()].view(rows, columns // BLOCK, BLOCK)
        scales = self.scales.view(torch.float8_e4m3fn).float()
        return (values * scales.unsqueeze(-1)).view(rows, columns).to(dtype)

    def dequantize(self) -> torch.Tensor:
        """``(e2m1 · block scale) · (amax / 2688)``, float32 [M, K]; another order may differ by one ulp."""
        return self.operand() * (self.amax / GLOBAL_RANGE)


def quantize(x: torch.Tensor | np.ndarray, amax: float | torch.Tensor | None = None) -> NVFP4Tensor:
    """Quantises a matrix.

    Args:
        x: [M, K], any float type (converted to float32); K is a multiple of 16 (see `pad_columns`).
        amax: fixes the global scale at ``amax / 2688``; None uses ``max |x|``. Blocks that exceed it saturate.

    Raises ValueError: x has NaN or Inf, which E2M1 cannot represent, or its shape does not divide into blocks.

    Source: Transformer Engine, quantize_transpose_nvfp4.cuh and core_nvfp4.cuh.
    """
    matrix = torch.as_tensor(x).detach().to(torch.float32)
    if matrix.dim() != 2 or matrix.shape[1] % BLOCK:
        raise ValueError(
            f"cannot divide shape {tuple(matrix.shape)} into blocks of {BLOCK}: "
            f"it must be a matrix whose number of columns is a multiple of {BLOCK}"
        )
    rows, columns = matrix.shape
    blocks = matrix.reshape(rows, columns // BLOCK, BLOCK)
    block_amax = blocks.abs().amax(dim=-1)
    found = block_amax.max() if block_amax.numel() else matrix.new_zeros(())
    tensor_amax = found if amax is None else torch.as_tensor(amax, dtype=torch.float32, device=matrix.device)
    if not bool(torch.isfinite(found) & torch.isfinite(tensor_amax)):
        raise ValueError(f"NVFP4 cannot represent NaN or Inf: amax of the data is {float(found)}")

    scales, scaled = scale(blocks, block_amax, tensor_amax)
    return NVFP4Tensor(
        packed=pack(values_to_codes(scaled).view(rows, columns)),
        scales=scales.view(torch.uint8),
        amax=tensor_amax.clone(),
    )


def scale(blocks: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 scales [...] of blocks [..., 16] with maxima [...], and the scaled elements in [-6, 6], not yet rounded."""
    encode = encode_scale(amax)
    scales = (block_amax * (encode * SIXTH)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    element_scale = (scales.float() * encode.reciprocal()).reciprocal().clamp(max=FLT_MAX)
    return scales, (blocks * element_scale.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)


def encode_scale(amax: torch.Tensor) -> torch.Tensor:
    """``2688 / amax`` (float32), at most FLT_MAX; 1 if amax is 0."""
    # torch.div, because torch computes `number / tensor` as a reciprocal and a product, which rounds twice.
    encode = torch.div(torch.full_like(amax, GLOBAL_RANGE), amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (encode == 0), torch.ones_like(encode), encode)


def values_to_codes(y: torch.Tensor) -> torch.Tensor:
    """Rounds float32 values in [-6, 6] to the nearest E2M1 code (uint8, 0…15); ties go to the even mantissa."""
    size = y.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for exclusive in (0.25, 1.25, 2.5, 5.0):
        code += size > exclusive
    for inclusive in (0.75, 1.75, 3.5):
        code += size >= inclusive
    return code + 8 * torch.signbit(y).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [M, K] → bytes [M, K/2], even index in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`: bytes [M, K/2] → uint8 codes [M, K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def pad_columns(x: torch.Tensor) -> torch.Tensor:
    """Appends zero columns to x [M, K] until K is a multiple of 32; returns x itself if it already is."""
    missing = -x.shape[-1] % K_MULTIPLE
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
