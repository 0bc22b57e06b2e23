"""A linear layer with NVFP4's numerics on any device, without its speed: tier ``nvfp4-emulated``.

Each product of an E2M1 code and an E4M3 block scale is exact in bfloat16. So both operands are stored without their
global scales (bfloat16 on accelerators, float32 on the CPU) and multiplied with float32 accumulation. The product of
the two global scales, alpha, and the bias are applied to the accumulator in float32, as in the epilogue of an FP4
kernel. The result is rounded once to the output's type. Folding the global scale into a bfloat16 operand instead would
change half of all outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from solrl_ray.quantization import nvfp4
from solrl_ray.quantization.activations import ActivationQuantizer
from solrl_ray.quantization.layers import QuantizedLinear

_ALPHA_UNIT = np.float32(nvfp4.ALPHA_UNIT)


class EmulatedNVFP4Linear(QuantizedLinear):
    """Computes ``quantize(x) @ quantize(W).T + bias``. For sampling only: it has no gradient."""

    format = "nvfp4"
    bias_dtype = torch.float32
    packed: Tensor
    scales: Tensor
    amax: Tensor
    operand: Tensor

    def __init__(self, tensors: Mapping[str, Tensor], bias: Tensor | None, in_features: int) -> None:
        super().__init__(tensors, bias, in_features)
        self.quantizer = ActivationQuantizer()
        """Layers that share a quantiser quantise a common input once."""
        on_cpu = self.packed.device.type == "cpu"
        self.register_buffer("operand", self.weight().operand(torch.float32 if on_cpu else torch.bfloat16))

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        super()._write(tensors)
        self.operand.copy_(self.weight().operand())

    def weight(self) -> nvfp4.NVFP4Tensor:
        """The quantised weight of this layer: its buffers, not a copy."""
        return nvfp4.NVFP4Tensor(**self.tensors())

    def forward(self, x: Tensor) -> Tensor:
        """Shapes and types as in `QuantizedLinear`. On the CPU, raises NotFiniteError if x has NaN or Inf."""
        activation = self.quantizer(x)
        if isinstance(activation.amax, float):
            out = torch.mm(activation.operand, self.operand.t())
            # Both products below are rounded to float32.
            alpha = float(np.float32(activation.amax) * np.float32(self.amax.item()) * _ALPHA_UNIT)
            out = out.mul_(alpha) if self.bias is None else torch.add(self.bias, out, alpha=alpha, out=out)
        else:
            out = torch.mm(activation.operand, self.operand.t(), out_dtype=torch.float32)
            out = out.mul_(activation.amax * self.amax * nvfp4.ALPHA_UNIT)
            out = out if self.bias is None else out.add_(self.bias)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)
