"""SANA's feed-forward and attention, in the forms that we train and quantise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from diffusers.models.transformers.sana_transformer import GLUMBConv
from diffusers.models.transformers.transformer_sana_video import GLUMBTempConv, SanaLinearAttnProcessor3_0
from torch import Tensor, nn


class LinearGLU(nn.Module):
    """SANA's feed-forward, with linears in place of its 1×1 convolutions: same weights, same paths."""

    def __init__(self, stock: Any) -> None:
        """Takes over the weights of `stock`. Raises `ValueError` if it has features that SANA's blocks do not use."""
        super().__init__()
        if stock.norm is not None or stock.residual_connection:
            raise ValueError("a feed-forward with a norm or a residual connection is not SANA's")
        self.nonlinearity = stock.nonlinearity
        self.conv_inverted = as_linear(stock.conv_inverted)
        self.conv_depth = stock.conv_depth
        self.conv_point = as_linear(stock.conv_point)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, C, H, W] → same shape. Channels are last in memory, so permuting copies nothing."""
        return self._gated(hidden_states.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def _gated(self, hidden_states: Tensor) -> Tensor:
        """[B, H, W, C] → same shape."""
        hidden = self.nonlinearity(self.conv_inverted(hidden_states))
        hidden = self.conv_depth(hidden.permute(0, 3, 1, 2))
        hidden, gate = torch.chunk(hidden, 2, dim=1)
        hidden = hidden * self.nonlinearity(gate)
        result: Tensor = self.conv_point(hidden.permute(0, 2, 3, 1))
        return result


class TemporalGLU(LinearGLU):
    """SANA-Video's feed-forward, which also mixes frames."""

    def __init__(self, stock: GLUMBTempConv) -> None:
        super().__init__(stock)
        self.conv_temp = stock.conv_temp

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, H, W, C] → same shape."""
        batch, frames, height, width, channels = hidden_states.shape
        hidden = self._gated(hidden_states.flatten(0, 1))
        # The convolution over frames takes [B, C, T, H W].
        over_time = hidden.view(batch, frames, height * width, channels).permute(0, 3, 1, 2)
        over_time = over_time + self.conv_temp(over_time)
        return over_time.permute(0, 2, 3, 1).view(batch, frames, height, width, channels)


class LinearAttention:
    """SANA's linear attention, which sums over tokens in float32, even under a learner's autocast.

    The stock processor casts its operands to float32, but autocast would round them to bfloat16 again. The learner
    would then compute another policy than the one that sampled. So only the linears run under autocast.
    """

    def __init__(self, stock: Any) -> None:
        """`stock`: the processor of diffusers that computes the attention."""
        self._stock = stock

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        device = hidden_states.device.type
        positions = {} if rotary_emb is None else {"rotary_emb": rotary_emb}
        inputs = hidden_states, encoder_hidden_states, attention_mask
        attended: Tensor
        if hidden_states.is_meta or not torch.is_autocast_enabled(device):
            attended = self._stock(attn, *inputs, **positions)
            return attended
        linears = _LinearsUnderAutocast(attn, device, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            attended = self._stock(linears, *inputs, **positions)
        return attended


class _LinearsUnderAutocast:
    """The attributes of an attention layer that a processor uses, with its linears under autocast."""

    def __init__(self, attn: Any, device: str, dtype: torch.dtype) -> None:
        def cast(linear: nn.Module) -> Callable[[Tensor], Tensor]:
            def call(hidden_states: Tensor) -> Tensor:
                with torch.autocast(device, dtype=dtype):
                    projected: Tensor = linear(hidden_states)
                return projected

            return call

        self.heads, self.norm_q, self.norm_k = attn.heads, attn.norm_q, attn.norm_k
        self.to_q, self.to_k, self.to_v = cast(attn.to_q), cast(attn.to_k), cast(attn.to_v)
        self.to_out = [cast(attn.to_out[0]), attn.to_out[1]]


def as_linear(convolution: nn.Conv2d) -> nn.Linear:
    """The linear over channels that equals a 1×1 convolution; it shares the convolution's memory.

    Raises `ValueError` for other convolutions.
    """
    if convolution.kernel_size != (1, 1) or convolution.groups != 1:
        raise ValueError(f"a convolution of {convolution.kernel_size}, groups {convolution.groups} is no linear")
    linear = nn.Linear(convolution.in_channels, convolution.out_channels, bias=False, device="meta")
    linear.weight = nn.Parameter(convolution.weight.detach()[:, :, 0, 0])
    if convolution.bias is not None:
        linear.bias = nn.Parameter(convolution.bias.detach())
    return linear


FEED_FORWARDS = {GLUMBConv: LinearGLU, GLUMBTempConv: TemporalGLU}
"""Feed-forward of the stock transformers, for images and for videos → our replacement."""
ATTENTION = (SanaLinearAttnProcessor2_0, SanaLinearAttnProcessor3_0)
"""Attention processors of the stock transformers for the image tokens."""


def adapt_(transformer: nn.Module) -> nn.Module:
    """Replace feed-forwards and linear attention in place, without changing results."""
    for name, module in list(transformer.named_modules()):
        if type(module) in FEED_FORWARDS:
            parent, _, leaf = name.rpartition(".")
            setattr(transformer.get_submodule(parent), leaf, FEED_FORWARDS[type(module)](module))
        elif isinstance(getattr(module, "processor", None), ATTENTION):
            module.processor = LinearAttention(module.processor)
    return transformer
