"""SANA-Video, through the parts of a diffusers `SanaVideoPipeline` checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import AutoencoderKLWan, SanaVideoPipeline, SanaVideoTransformer3DModel
from diffusers.models.transformers.transformer_sana_video import GLUMBTempConv, SanaLinearAttnProcessor3_0
from torch import Tensor

from solrl_ray.models import sizes
from solrl_ray.models.sana import LinearGLU, Sana


class TemporalGLU(LinearGLU):
    """SANA-Video's feed-forward, which also mixes frames."""

    def __init__(self, stock: GLUMBTempConv) -> None:
        super().__init__(stock)
        self.conv_temp = stock.conv_temp

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, H, W, C] to the same shape."""
        batch, frames, height, width, channels = hidden_states.shape
        hidden = self._gated(hidden_states.flatten(0, 1))
        # A convolution over frames: [B, C, T, H W].
        over_time = hidden.view(batch, frames, height * width, channels).permute(0, 3, 1, 2)
        over_time = over_time + self.conv_temp(over_time)
        return over_time.permute(0, 2, 3, 1).view(batch, frames, height, width, channels)


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
    FEED_FORWARD: ClassVar[tuple[type, type]] = (GLUMBTempConv, TemporalGLU)
    ATTENTION: ClassVar[type] = SanaLinearAttnProcessor3_0

    def _denormalised(self, decoder: Any, latents: Tensor) -> Tensor:
        mean, std = (
            latents.new_tensor(decoder.config[f"latents_{name}"])[:, None, None, None] for name in ("mean", "std")
        )
        return latents * std + mean
