"""A linear in FP8 with static buffers: tier ``fp8``, for GPUs of compute capability 8.9 and newer."""

from __future__ import annotations

import torch
from torch import Tensor

from solrl_ray.quantization.fp8 import quantize_rows
from solrl_ray.quantization.layers import QuantizedLinear


class FP8Linear(QuantizedLinear):
    """Linear with one scale per weight row, and one per activation row computed at run time (`fp8.row_scale`).

    The product is torch's scaled matrix product with bfloat16 output. Activations are quantised by plain elementwise
    code, which a compiler fuses with the preceding code and shares between consumers. Without CUDA the codes are exact
    but the product is computed in float32: slow, for tests.
    """

    format = "fp8-row"
    bias_dtype = torch.bfloat16
    codes: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Shapes and types as in `QuantizedLinear`. A row with NaN or Inf gives a row of NaN."""
        codes, scale = quantize_rows(x.reshape(-1, self.in_features).contiguous().float())
        weight = self.codes.view(torch.float8_e4m3fn)
        if x.device.type == "cuda":
            out = torch._scaled_mm(
                codes,
                weight.t(),
                scale_a=scale,
                scale_b=self.scale.unsqueeze(0),
                bias=self.bias,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
        else:
            product = torch.mm(codes.float(), weight.float().t()) * scale * self.scale
            out = product if self.bias is None else product + self.bias.float()
            out = out.to(torch.bfloat16)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)
