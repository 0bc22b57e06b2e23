"""SANA-Video, through the parts of a diffusers `SanaVideoPipeline` checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, SanaVideoPipeline, SanaVideoTransformer3DModel
from diffusers.models.transformers.transformer_sana_video import GLUMBTempConv
from torch import Tensor, nn

from solrl_ray.models import sizes
from solrl_ray.models.sana import Sana, as_linear


class SanaVideo(Sana):
    """Latents [B, 16, T, H/8, W/8] of Wan 2.1's autoencoder; T = 1 + (frames - 1) / 4.

    Text as SANA's, without the pipeline's default "complex human instruction". What the authors append to a prompt, its
    motion score, is part of the prompt. The timestep is 1000 sigma, in float32. The 1×1 convolutions of the
    feed-forward are linears here.
    """

    PIPELINE = SanaVideoPipeline
    TRANSFORMER = SanaVideoTransformer3DModel
    DECODERS: ClassVar[Mapping[str, Any]] = {"AutoencoderKLWan": AutoencoderKLWan}
    SIZES = sizes.SANA_VIDEO
    TRAINS_ON_CUDNN = False

    def _denormalised(self, decoder: Any, latents: Tensor) -> Tensor:
        mean, std = (
            latents.new_tensor(decoder.config[f"latents_{name}"])[:, None, None, None] for name in ("mean", "std")
        )
        return latents * std + mean

    @classmethod
    def adapt_(cls, transformer: nn.Module) -> nn.Module:
        for name, module in list(transformer.named_modules()):
            if isinstance(module, GLUMBTempConv):
                parent, _, leaf = name.rpartition(".")
                setattr(transformer.get_submodule(parent), leaf, TemporalGLU(module))
        return transformer


class TemporalGLU(nn.Module):
    """SANA-Video's feed-forward with its 1×1 convolutions as linears of the same weights and the same paths."""

    def __init__(self, stock: GLUMBTempConv) -> None:
        """Takes over the weights of `stock`. Raises `ValueError` for features that SANA-Video's blocks do not use."""
        super().__init__()
        if stock.norm is not None or stock.residual_connection:
            raise ValueError("a feed-forward with its own norm or residual is not SANA-Video's")
        self.nonlinearity = stock.nonlinearity
        self.conv_inverted = as_linear(stock.conv_inverted)
        self.conv_depth = stock.conv_depth
        self.conv_point = as_linear(stock.conv_point)
        self.conv_temp = stock.conv_temp

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, H, W, C] to the same shape."""
        batch, frames, height, width, channels = hidden_states.shape
        hidden = self.nonlinearity(self.conv_inverted(hidden_states.flatten(0, 1)))
        hidden = self.conv_depth(hidden.permute(0, 3, 1, 2))
        hidden, gate = torch.chunk(hidden, 2, dim=1)
        hidden = hidden * self.nonlinearity(gate)
        hidden = self.conv_point(hidden.permute(0, 2, 3, 1))
        # A convolution over frames: [B, C, T, H W].
        over_time = hidden.view(batch, frames, height * width, channels).permute(0, 3, 1, 2)
        over_time = over_time + self.conv_temp(over_time)
        return over_time.permute(0, 2, 3, 1).view(batch, frames, height, width, channels)
