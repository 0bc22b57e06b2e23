"""NVFP4 in hardware through Transformer Engine: tier ``nvfp4``, for GPUs of compute capability 10.0 and newer.

Written to the documented interface of Transformer Engine 2.20. We have not yet run it on a Blackwell GPU. Two parts run
on other GPUs and are tested on them: `EngineLinear` with an FP8 recipe, and Transformer Engine's reference quantiser
against ours.

The recipe is `NVFP4BlockScaling` without random Hadamard transform, stochastic rounding and 16x16 blocks. Those serve
the backward pass of training; without them the codes are those of `nvfp4.quantize`. (The class `DelayedScaling` with
`Format.E2M1` is FP8, despite its name: docs/concepts/precision.md.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from solrl_ray.quantization import nvfp4
from solrl_ray.quantization.layers import QuantizedLinear

ROW_MULTIPLE = 16
"""Transformer Engine quantises activations in multiples of 16 rows; missing rows are padded with zeros."""


def nvfp4_recipe() -> Any:
    """Recipe with one-dimensional blocks, rounded to nearest: variant ``te-1d``."""
    from transformer_engine.common.recipe import NVFP4BlockScaling

    return NVFP4BlockScaling(
        disable_rht=True,
        disable_stochastic_rounding=True,
        disable_2d_quantization=True,
        row_scaled_activation=False,
        nvfp4_4over6="none",
    )


class EngineLinear(nn.Module):
    """`transformer_engine.pytorch.Linear` that stores only its quantised weight, for any recipe. For sampling only."""

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None, recipe: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self._autocast, self._recipe = te.autocast, recipe
        # Without gradients Transformer Engine keeps only the row-wise copy of the weight.
        with torch.no_grad(), te.quantized_model_init(enabled=True, recipe=recipe):
            self.linear = te.Linear(
                in_features, out_features, bias=bias is not None, params_dtype=torch.bfloat16, device="cuda"
            )
            if bias is not None:
                self.linear.bias.copy_(bias)
        self.linear.requires_grad_(False)

    @torch.no_grad()
    def refresh(self, weight: Tensor) -> None:
        """Quantises a bfloat16 weight [out, in] into the existing buffers."""
        self.linear.weight.quantize_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, in], bfloat16 → [rows, out], bfloat16."""
        rows = x.shape[0]
        padded = nn.functional.pad(x, (0, 0, 0, -rows % ROW_MULTIPLE))
        with self._autocast(enabled=True, recipe=self._recipe):
            out: Tensor = self.linear(padded)
        return out[:rows]


class EngineNVFP4Linear(QuantizedLinear):
    """An `EngineLinear` that stores exactly the published codes, block scales and amax."""

    format = "nvfp4"

    def __init__(self, tensors: Mapping[str, Tensor], bias: Tensor | None, in_features: int) -> None:
        """`in_features` must be a multiple of 32 (`planning.DIVISORS`): Transformer Engine does not pad."""
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = tensors["packed"].shape[0]
        self.engine = EngineLinear(in_features, self.out_features, bias, nvfp4_recipe())
        self.bias = self.engine.linear.bias if bias is not None else None
        # The scales are padded to whole tiles of 128 x 4; the padding must be zero.
        self._weight._rowwise_scale_inv.zero_()
        self._write(tensors)

    @property
    def _weight(self) -> Any:
        return self.engine.linear.weight

    def tensors(self) -> dict[str, Tensor]:
        scales = self._weight._rowwise_scale_inv[: self.out_features, : self.in_features // nvfp4.BLOCK]
        amax = self._weight._amax_rowwise.reshape(())
        return {"packed": self._weight._rowwise_data, "scales": scales.view(torch.uint8), "amax": amax}

    def _weight_buffers(self) -> list[Tensor]:
        """Empty: the weight is of Transformer Engine's tensor class, so `free` leaves it allocated."""
        return []

    def forward(self, x: Tensor) -> Tensor:
        out = self.engine(x.reshape(-1, self.in_features).to(torch.bfloat16))
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)


def engine_codes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x [M, K] (bfloat16, on a GPU) with Transformer Engine's quantiser: packed codes, scales, amax."""
    from transformer_engine.pytorch import NVFP4Quantizer

    quantized: Any = NVFP4Quantizer(rowwise=True, columnwise=False)(x)
    scales = quantized._rowwise_scale_inv[: x.shape[0], : x.shape[1] // nvfp4.BLOCK]
    return quantized._rowwise_data, scales.view(torch.uint8), quantized._amax_rowwise.reshape(())
