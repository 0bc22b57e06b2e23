"""Dynamic quantisation of activations: the same bits as `nvfp4.quantize`, in few passes and once per tensor.

An emulated linear needs its input as an exact operand (E2M1 value times block scale) and the input's amax, not as
packed codes. The CPU computes these in place, with float32 passes over two scratch buffers:

* E2M1 keeps one mantissa bit. So y is rounded by adding and subtracting ``1.5 · 2^22 · P``, with P the power of two
  below y, at least 1. The last bit of the sum is then worth one E2M1 step, and the hardware's tie rule is E2M1's. E4M3
  scales are rounded the same way with ``1.5 · 2^20 · P`` and P at least 2^-6. Both products are exact, so the addition
  may be fused.
* The largest of 16 neighbouring magnitudes is found on their integer bits, which have the same order as the floats.
  torch reduces integers several times faster, because they have no NaN.
* If every block scale is a normal E4M3 number, no value can leave [-6, 6], and the clamps are skipped.

Linears with the same input tensor (query, key and value projections) share one `ActivationQuantizer`, which quantises
that tensor once. Cache-sized chunks, a transposed layout and other ways to compute the block maximum were measured and
are not faster.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from solrl_ray.errors import NotFiniteError
from solrl_ray.quantization import nvfp4

_EXPONENT = 0x7F800000
"""Mask of a float32's exponent field. The bits of y under it are those of the power of two below |y|."""
_EXPONENT_TENSOR = torch.tensor(_EXPONENT, dtype=torch.int32)  # created once: creating it takes as long as using it
_ONE_BITS = 0x3F800000
_E4M3_MIN_NORMAL = 2.0**-6
_E4M3_MIN_NORMAL_BITS = 0x3C800000
_E2M1_MAGIC = 1.5 * 2**22
_E4M3_MAGIC = 1.5 * 2**20
_ONE = np.float32(1)
_SIXTH = np.float32(nvfp4.SIXTH)
_GLOBAL_RANGE = np.float32(nvfp4.GLOBAL_RANGE)
_SMALLEST_AMAX = nvfp4.GLOBAL_RANGE / nvfp4.FLT_MAX
"""Below this amax, 2688 / amax overflows float32."""
_SAFE_AMAX = 1e-30
"""Above this amax, no reciprocal of a normal block scale is near the limits of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """A quantised activation, valid until its quantiser is called with another tensor."""

    operand: torch.Tensor
    """[rows, K padded to a multiple of 32], exact: float32 on the CPU, bfloat16 on accelerators."""
    amax: torch.Tensor | float
    """max |x| over the whole tensor: a float on the CPU, float32 [] on accelerators (no synchronisation)."""


class ActivationQuantizer:
    """Quantises inputs of linears; remembers the last input, so that other linears can reuse the result.

    A tensor is recognised by its Python object, memory address and version counter, which each in-place operation of
    torch increments. Inference-mode tensors have no counter and are never shared. Not thread-safe.
    """

    def __init__(self) -> None:
        self._buffers = (torch.empty(0), torch.empty(0))
        self._scratch: dict[torch.Size, _Scratch] = {}
        self._source: weakref.ref[torch.Tensor] | None = None
        self._stamp = (0, 0)
        self._last: Activation | None = None
        self.shared = 0
        """Number of times that a remembered activation was reused."""

    def __call__(self, x: torch.Tensor) -> Activation:
        """Quantises x [..., K] with one amax over the whole tensor and 1x16 blocks along K.

        Raises NotFiniteError if x has NaN or Inf, on the CPU. On accelerators amax and product are then not finite.
        """
        recognised = self._source is not None and self._source() is x and _stamp(x) == self._stamp
        if self._last is not None and recognised:
            self.shared += 1
            return self._last
        self._last = None
        # Contiguous, because a batch of one SANA image has its channels first in memory.
        matrix = nvfp4.pad_columns(x.detach().reshape(-1, x.shape[-1]).float()).contiguous()
        activation = self._on_cpu(matrix) if x.device.type == "cpu" else _on_device(matrix)
        if not x.is_inference():
            self._source, self._stamp, self._last = weakref.ref(x), _stamp(x), activation
        return activation

    def _on_cpu(self, matrix: torch.Tensor) -> Activation:
        scratch = self._scratch.get(matrix.shape)
        if scratch is None:
            if matrix.numel() > self._buffers[0].numel():
                self._buffers = (torch.empty(matrix.numel()), torch.empty(matrix.numel()))
                self._scratch.clear()
            scratch = self._scratch[matrix.shape] = _Scratch(matrix.shape, *self._buffers)
        return _quantize_into(scratch, matrix)


class _Scratch:
    """Views of the two buffers for one shape, as blocks of 16 and as integers; created once per shape."""

    def __init__(self, shape: torch.Size, values: torch.Tensor, work: torch.Tensor) -> None:
        blocks = shape.numel() // nvfp4.BLOCK
        self.values = values[: shape.numel()].view(shape)
        self.value_blocks = self.values.view(blocks, nvfp4.BLOCK)
        self.value_bits = self.values.view(torch.int32)
        self.work = work[: shape.numel()].view(shape)
        self.work_bits = self.work.view(torch.int32)
        self.work_bit_blocks = self.work_bits.view(blocks, nvfp4.BLOCK)
        self.scales = torch.empty(blocks)
        self.scale_bits = self.scales.view(torch.int32)
        self.scale_column = self.scales.unsqueeze(1)
        self.element_scales = torch.empty(blocks)
        self.element_scale_bits = self.element_scales.view(torch.int32)
        self.element_scale_column = self.element_scales.unsqueeze(1)


def _quantize_into(scratch: _Scratch, matrix: torch.Tensor) -> Activation:
    """Fused quantiser: float32 [rows, K] on the CPU → operand in ``scratch.values``."""
    torch.abs(matrix, out=scratch.work)
    torch.amax(scratch.work_bit_blocks, 1, out=scratch.scale_bits)
    lowest, highest = (extreme.item() for extreme in torch.aminmax(scratch.scales))
    if not math.isfinite(highest):
        raise NotFiniteError(f"NVFP4 cannot represent NaN or Inf: amax of the activation is {highest}")
    encode = _encode_scale(highest)
    to_scale = encode * _SIXTH
    all_normal = highest > _SAFE_AMAX and bool(np.float32(lowest) * to_scale >= _E4M3_MIN_NORMAL)

    scales = scratch.scales.mul_(float(to_scale))
    element_scales = scratch.element_scales
    torch.bitwise_and(scratch.scale_bits, _EXPONENT_TENSOR, out=scratch.element_scale_bits)
    if not all_normal:
        scratch.element_scale_bits.clamp_(min=_E4M3_MIN_NORMAL_BITS)
    scales.add_(element_scales, alpha=_E4M3_MAGIC).sub_(element_scales, alpha=_E4M3_MAGIC)
    torch.mul(scales, float(_ONE / encode), out=element_scales).reciprocal_()
    if not all_normal:
        element_scales.clamp_(max=nvfp4.FLT_MAX)

    values, work = scratch.values, scratch.work
    torch.mul(matrix.view_as(scratch.value_blocks), scratch.element_scale_column, out=scratch.value_blocks)
    if not all_normal:
        values.clamp_(-nvfp4.E2M1_MAX, nvfp4.E2M1_MAX)
    torch.bitwise_and(scratch.value_bits, _EXPONENT_TENSOR, out=scratch.work_bits)
    scratch.work_bits.clamp_(min=_ONE_BITS)
    values.add_(work, alpha=_E2M1_MAGIC).sub_(work, alpha=_E2M1_MAGIC)
    scratch.value_blocks.mul_(scratch.scale_column)
    return Activation(operand=values, amax=highest)


def _stamp(x: torch.Tensor) -> tuple[int, int]:
    return (x.data_ptr(), -1 if x.is_inference() else x._version)


def _encode_scale(amax: float) -> np.float32:
    """`nvfp4.encode_scale` for a Python float."""
    if amax < _SMALLEST_AMAX:
        return _ONE if amax == 0 else np.float32(nvfp4.FLT_MAX)
    return _GLOBAL_RANGE / np.float32(amax)


def _on_device(matrix: torch.Tensor) -> Activation:
    """Quantise on an accelerator, without synchronising with it."""
    blocks = matrix.view(matrix.shape[0], -1, nvfp4.BLOCK)
    block_amax = blocks.abs().amax(dim=-1)
    amax = block_amax.amax()
    scales, scaled = nvfp4.scale(blocks, block_amax, amax)
    power = (scaled.view(torch.int32) & _EXPONENT).clamp(min=_ONE_BITS).view(torch.float32) * _E2M1_MAGIC
    operand = ((scaled + power) - power) * scales.float().unsqueeze(-1)
    return Activation(operand=operand.view(matrix.shape).to(torch.bfloat16), amax=amax)
