"""Merges LoRA factors into a weight, with the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor

_CACHE_BYTES = 1 << 20
"""Size of a block of rows. Its float64 sums should stay in the cache during the loop over the rank."""


@torch.no_grad()
def merged_weight(base: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """base + scaling · B A, in float64, rounded once (to nearest, ties to even) to the dtype of `base`.

    The product of two float32 numbers is exact in float64, and the sum over the rank runs in order. So neither fused
    operations nor a device's blocking of matrix products changes a bit.

    Args:
        base: float32 or bfloat16 [out, in].
        lora_a: float32 [rank, in].
        lora_b: float32 [out, rank].
        scaling: alpha / rank.

    Raises:
        ValueError: the shapes do not fit, or a dtype is not supported.
    """
    rank = lora_a.shape[0]
    if lora_a.shape != (rank, base.shape[1]) or lora_b.shape != (base.shape[0], rank):
        raise ValueError(f"factors {tuple(lora_a.shape)}, {tuple(lora_b.shape)} do not fit weight {tuple(base.shape)}")
    if lora_a.dtype != torch.float32 or lora_b.dtype != torch.float32:
        raise ValueError(f"factors are {lora_a.dtype} and {lora_b.dtype}, not float32")
    if base.is_cuda:
        from solrl_ray.policy import merge_kernel  # CUDA comes with Triton

        return merge_kernel.merged_weight(base, lora_a.to(base.device), lora_b.to(base.device), scaling)
    a, b = lora_a.double(), lora_b.double()
    merged = torch.empty_like(base)
    rows = max(1, _CACHE_BYTES // (8 * max(1, base.shape[1])))
    for start in range(0, base.shape[0], rows):
        block = slice(start, start + rows)
        total = torch.zeros(base[block].shape, dtype=torch.float64)
        for r in range(rank):
            total.addcmul_(b[block, r : r + 1], a[r : r + 1, :])
        merged[block] = round_once(total.mul_(scaling).add_(base[block].to(torch.float64)), base.dtype)
    return merged


def round_once(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to float32 or bfloat16 with a single rounding to nearest, ties to even.

    `Tensor.to(bfloat16)` goes through float32 and can round twice. Here the step to float32 rounds to odd, which keeps
    the sticky bit for the second step (Boldo & Melquiond 2008).
    """
    if dtype == torch.float32:
        return value.to(torch.float32)
    if dtype != torch.bfloat16:
        raise ValueError(f"weights are float32 or bfloat16, not {dtype}")
    nearest = value.to(torch.float32)
    widened = nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    # Subtracting 1 from the bits is one step towards zero, for either sign.
    towards_zero = bits - (widened.abs() > value.abs()).to(torch.int32)
    odd = torch.where(widened == value, bits, towards_zero | 1)
    return odd.view(torch.float32).to(torch.bfloat16)
