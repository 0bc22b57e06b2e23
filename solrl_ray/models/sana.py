"""SANA and SANA-Video, through the parts of their diffusers checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLWan,
    AutoencoderTiny,
    SanaPipeline,
    SanaTransformer2DModel,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from diffusers.models.transformers.sana_transformer import GLUMBConv
from diffusers.models.transformers.transformer_sana_video import GLUMBTempConv, SanaLinearAttnProcessor3_0
from torch import Tensor, nn

from solrl_ray.models import attention, sizes
from solrl_ray.models.base import DiffusionModel

TIMESTEPS = 1000
"""Of the diffusion time that the transformer was trained with."""


class LinearGLU(nn.Module):
    """SANA's feed-forward with its 1×1 convolutions as linears of the same weights and the same paths."""

    def __init__(self, stock: Any) -> None:
        """Takes over the weights of `stock`. Raises `ValueError` for features that SANA's blocks do not use."""
        super().__init__()
        if stock.norm is not None or stock.residual_connection:
            raise ValueError("a feed-forward with its own norm or residual is not SANA's")
        self.nonlinearity = stock.nonlinearity
        self.conv_inverted = as_linear(stock.conv_inverted)
        self.conv_depth = stock.conv_depth
        self.conv_point = as_linear(stock.conv_point)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, C, H, W] to the same shape. Channels are last in memory, so that permuting copies nothing."""
        return self._gated(hidden_states.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def _gated(self, hidden_states: Tensor) -> Tensor:
        """[B, H, W, C] to the same shape."""
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
        """[B, T, H, W, C] to the same shape."""
        batch, frames, height, width, channels = hidden_states.shape
        hidden = self._gated(hidden_states.flatten(0, 1))
        # A convolution over frames: [B, C, T, H W].
        over_time = hidden.view(batch, frames, height * width, channels).permute(0, 3, 1, 2)
        over_time = over_time + self.conv_temp(over_time)
        return over_time.permute(0, 2, 3, 1).view(batch, frames, height, width, channels)


class LinearAttention:
    """SANA's linear attention, which sums over tokens in float32, also under the learner's autocast.

    The stock processor casts to float32 what it multiplies, and autocast would round that to bfloat16 again: a learner
    would compute another policy than the one that sampled. So only the linears are under autocast here.
    """

    def __init__(self, stock: Any) -> None:
        """`stock`: a processor of diffusers, whose formula is kept."""
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
    """What a processor uses of an attention layer."""

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


class Sana(DiffusionModel):
    """Latents [B, 32, H/32, W/32].

    Text: Gemma, with the mask of its padding, and without the pipeline's default "complex human instruction", as Sol-RL
    trains: call the stock pipeline with ``complex_human_instruction=None``. The timestep is sigma · 1000 · the
    checkpoint's `timestep_scale`, in float32. The 1×1 convolutions of the feed-forward are linears here (`LinearGLU`),
    so that they can be quantised and take LoRA factors.

    The stock layers differ from the published training checkpoint's: separate `to_q`, `to_k`, `to_v` instead of one
    `qkv` and one `kv`. So each has its own LoRA factor A, and none is wider than the published limit for quantisation.
    """

    PIPELINE = SanaPipeline
    TRANSFORMER = SanaTransformer2DModel
    DECODERS: ClassVar[Mapping[str, Any]] = {"AutoencoderDC": AutoencoderDC, "AutoencoderTiny": AutoencoderTiny}
    ENCODERS = ("text_encoder",)
    SIZES = sizes.SANA
    TRAINS_ON_CUDNN = True
    FEED_FORWARD: ClassVar[tuple[type, type]] = (GLUMBConv, LinearGLU)
    """Class of the stock transformer's feed-forward, and ours."""
    ATTENTION: ClassVar[type] = SanaLinearAttnProcessor2_0
    """Of the stock transformer, on the image's tokens."""

    def _set_up(self, transformer_config: Mapping[str, Any]) -> None:
        self._timesteps = TIMESTEPS * float(transformer_config.get("timestep_scale") or 1.0)

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, max_sequence_length, width], ``prompt_attention_mask`` [B, max_sequence_length]."""
        sequence, mask, _, _ = pipeline.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.config.max_sequence_length,
        )
        return {"prompt_embeds": sequence, "prompt_attention_mask": mask}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        sequence, mask = embedding["prompt_embeds"], embedding["prompt_attention_mask"]
        if latents.is_cuda and attention.is_memory_efficient():
            sequence, mask = attention.padded_text(sequence, mask)
        velocity: Tensor = self.transformer(
            latents,
            encoder_hidden_states=sequence,
            encoder_attention_mask=mask,
            timestep=sigmas * self._timesteps,
            return_dict=False,
        )[0]
        # If a checkpoint also predicts a variance, it is in the second half of the channels.
        return velocity[:, : self.latent_shape[0]]

    @classmethod
    def adapt_(cls, transformer: nn.Module) -> nn.Module:
        stock, made = cls.FEED_FORWARD
        for name, module in list(transformer.named_modules()):
            if isinstance(module, stock):
                parent, _, leaf = name.rpartition(".")
                setattr(transformer.get_submodule(parent), leaf, made(module))
            elif isinstance(getattr(module, "processor", None), cls.ATTENTION):
                module.processor = LinearAttention(module.processor)
        return transformer

    @classmethod
    def _token_counts(cls, tokenizer: Any, texts: Sequence[str]) -> list[int]:
        # As the pipeline prepares a text.
        return super()._token_counts(tokenizer, [text.lower().strip() for text in texts])


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


def as_linear(convolution: nn.Conv2d) -> nn.Linear:
    """The linear over channels that equals a 1×1 convolution; shares its memory."""
    if convolution.kernel_size != (1, 1) or convolution.groups != 1:
        raise ValueError(f"a convolution of {convolution.kernel_size}, groups {convolution.groups} is no linear")
    linear = nn.Linear(convolution.in_channels, convolution.out_channels, bias=False, device="meta")
    linear.weight = nn.Parameter(convolution.weight.detach()[:, :, 0, 0])
    if convolution.bias is not None:
        linear.bias = nn.Parameter(convolution.bias.detach())
    return linear
