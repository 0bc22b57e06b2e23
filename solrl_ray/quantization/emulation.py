"""A linear layer with NVFP4's numerics on any device (never its speed): tier ``nvfp4-emulated``.

Every product of an E2M1 code and an E4M3 block scale is exact in bfloat16. Both operands are therefore held
without their global scales (bfloat16 on accelerators, float32 on the CPU), multiplied with float32
accumulation, and the product of the two global scales, alpha, is applied to the accumulator in float32, with
the bias, as the epilogue of a real FP4 kernel does it; then there is one rounding to the output's type.
Folding the global scale into a bfloat16 operand instead would change half of all outputs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from solrl_ray.quantization import nvfp4
from solrl_ray.quantization.activations import ActivationQuantizer

_ALPHA_UNIT = np.float32(nvfp4.ALPHA_UNIT)
HEADROOM = 1.5
"""The frozen global scale of a weight has room for this times the base's amax; it costs no accuracy."""


def frozen_amax(base: torch.Tensor) -> float:
    """The amax with which a weight is quantised in every revision: 1.5 · max |W| of the bfloat16 base.

    A scale that does not follow each update keeps the codes of consecutive revisions equal where the weights
    are.

    Raises:
        ValueError: the weight has NaN or Inf.
    """
    amax = base.detach().to(torch.bfloat16).float().abs().max()
    if not torch.isfinite(amax):
        raise ValueError(f"cannot quantise a weight whose amax is {float(amax)}")
    return float(HEADROOM * amax)


def quantize_weight(weight: torch.Tensor, amax: float) -> nvfp4.NVFP4Tensor:
    """Rounds a weight [out, in] to bfloat16, pads K to 32 and quantises it with the given amax."""
    return nvfp4.quantize(nvfp4.pad_columns(weight.detach().to(torch.bfloat16).float()), amax)


class EmulatedNVFP4Linear(nn.Module):
    """Computes ``quantize(x) @ quantize(W).T + bias``; for sampling only, it has no gradient.

    The buffers keep their addresses for the life of the layer: `load` writes a new weight into them.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor
    operand: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        weight: nvfp4.NVFP4Tensor,
        bias: torch.Tensor | None,
        in_features: int,
        quantizer: ActivationQuantizer | None = None,
    ) -> None:
        """Takes a packed weight [out, in padded to 32]; layers with one quantiser share inputs."""
        super().__init__()
        self.in_features = in_features
        self.out_features = weight.shape[0]
        self.quantizer = quantizer if quantizer is not None else ActivationQuantizer()
        on_cpu = weight.packed.device.type == "cpu"
        self.register_buffer("packed", weight.packed.clone())
        self.register_buffer("scales", weight.scales.clone())
        self.register_buffer("amax", weight.amax.clone())
        self.register_buffer("operand", weight.operand(torch.float32 if on_cpu else torch.bfloat16))
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    @classmethod
    def from_linear(cls, linear: nn.Linear, quantizer: ActivationQuantizer | None = None) -> EmulatedNVFP4Linear:
        """Quantises a linear with its own frozen amax, which is what revision 0 publishes for it."""
        weight = quantize_weight(linear.weight, frozen_amax(linear.weight))
        return cls(weight, linear.bias, linear.in_features, quantizer)

    def load(self, weight: nvfp4.NVFP4Tensor) -> None:
        """Overwrites the weight in place.

        Raises:
            ValueError: the shape is not this layer's.
        """
        if weight.packed.shape != self.packed.shape:
            raise ValueError(f"packed weight of shape {weight.shape} for a layer of {tuple(self.operand.shape)}")
        self.packed.copy_(weight.packed)
        self.scales.copy_(weight.scales)
        self.amax.copy_(weight.amax)
        self.operand.copy_(self.weight().operand())

    def weight(self) -> nvfp4.NVFP4Tensor:
        """The quantised weight that the layer computes with (its buffers, not a copy)."""
        return nvfp4.NVFP4Tensor(packed=self.packed, scales=self.scales, amax=self.amax)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] of any float type → [..., out_features] of the same type.

        Raises:
            RuntimeError: a gradient is asked for, or the module was cast to another type after quantisation.
            ValueError: x has NaN or Inf.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("an emulated NVFP4 linear samples only: it has no gradient (use torch.no_grad)")
        if self.amax.dtype != torch.float32:
            raise RuntimeError(f"the layer's scale was cast to {self.amax.dtype}: quantise after casting, not before")
        activation = self.quantizer(x)
        if isinstance(activation.amax, float):
            out = torch.mm(activation.operand, self.operand.t())
            alpha = _alpha(activation.amax, self.amax.item())
            out = out.mul_(alpha) if self.bias is None else torch.add(self.bias, out, alpha=alpha, out=out)
        else:
            out = torch.mm(activation.operand, self.operand.t(), out_dtype=torch.float32)
            out = out.mul_(activation.amax * self.amax * nvfp4.ALPHA_UNIT)
            out = out if self.bias is None else out.add_(self.bias)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _alpha(activation_amax: float, weight_amax: float) -> float:
    """``amax_a · amax_w · ALPHA_UNIT``, each product rounded to float32."""
    return float(np.float32(activation_amax) * np.float32(weight_amax) * _ALPHA_UNIT)
