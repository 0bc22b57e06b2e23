"""SANA and SANA-Video, from their diffusers checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from solrl_ray.config.schema import Model
from solrl_ray.models import attention
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.libraries import Stock
from solrl_ray.models.sizes import DecoderSizes, FamilySizes
from solrl_ray.models.wan import WAN_VAE, denormalised

if TYPE_CHECKING:
    from torch import Tensor, nn

TIMESTEPS = 1000
"""Timesteps of the diffusion process that the transformer was trained with."""


class Sana(DiffusionModel):
    """Latents [B, 32, H/32, W/32].

    Text: Gemma, with a mask for its padding. As in Sol-RL, we train without the pipeline's default "complex human
    instruction", so call the stock pipeline with ``complex_human_instruction=None``. The timestep is sigma · 1000 · the
    checkpoint's `timestep_scale`, in float32. The 1×1 convolutions of the feed-forward are replaced by linears
    (`sana_layers.LinearGLU`), so they can be quantised and modified by LoRA.

    The stock layers differ from those of the published training code: `to_q`, `to_k`, `to_v` are separate, instead of
    one `qkv` and one `kv`. So each has a separate LoRA factor A, and none exceeds the published width limit for
    quantisation.
    """

    PIPELINE = Stock("SanaPipeline")
    TRANSFORMER = Stock("SanaTransformer2DModel")
    DECODERS: ClassVar[tuple[str, ...]] = ("AutoencoderDC", "AutoencoderTiny")
    ENCODERS = ("text_encoder",)
    SIZES = FamilySizes(  # kept_values: measured, plus (1.0, 4.4) that float32 attention adds, counted on a CPU
        patch=1,
        longest=300,
        packed=False,
        text_in_blocks=False,
        kept_values=(30.6, 41.9),
        forward_values=15.6,
        decoder=DecoderSizes(parameters=312_250_275, bytes_a_pixel=1666),
    )
    TRAINS_ON_CUDNN = True
    CONVOLUTIONS = ("ff.conv_inverted", "ff.conv_point")

    @classmethod
    def stock_arguments(cls, model: Model) -> dict[str, Any]:
        return super().stock_arguments(model) | {"complex_human_instruction": None, "use_resolution_binning": False}

    def _set_up(self, transformer_config: Mapping[str, Any]) -> None:
        self._timesteps = TIMESTEPS * float(transformer_config.get("timestep_scale") or 1.0)

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, max_sequence_length, width], ``prompt_attention_mask`` [B, max_sequence_length]."""
        sequence, mask, _, _ = self._encode_prompt(pipeline, texts, do_classifier_free_guidance=False)
        return {"prompt_embeds": sequence, "prompt_attention_mask": mask}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        sequence, mask = embedding["prompt_embeds"], embedding["prompt_attention_mask"]
        if latents.is_cuda and attention.is_memory_efficient():
            sequence, mask = attention.padded_text(sequence, mask)
        velocity = self._call(
            latents,
            encoder_hidden_states=sequence,
            encoder_attention_mask=mask,
            timestep=sigmas * self._timesteps,
        )
        # If a checkpoint also predicts a variance, it is in the second half of the channels.
        return velocity[:, : self.latent_shape[0]]

    @classmethod
    def adapt_(cls, transformer: nn.Module) -> nn.Module:
        from solrl_ray.models import sana_layers

        return sana_layers.adapt_(transformer)

    @classmethod
    def _token_counts(cls, tokenizer: Any, texts: Sequence[str]) -> list[int]:
        # The pipeline prepares texts like this.
        return super()._token_counts(tokenizer, [text.lower().strip() for text in texts])


class SanaVideo(Sana):
    """Latents [B, 16, T, H/8, W/8] of Wan 2.1's autoencoder; T = 1 + (frames - 1) / 4.

    Text: as in SANA, without the pipeline's default "complex human instruction". The motion score that the authors
    append to a prompt must be part of the prompt. The timestep is 1000 sigma, in float32. The 1×1 convolutions of the
    feed-forward are replaced by linears.
    """

    PIPELINE = Stock("SanaVideoPipeline")
    TRANSFORMER = Stock("SanaVideoTransformer3DModel")
    DECODERS = ("AutoencoderKLWan",)
    # kept_values are SANA's: not measured for videos.
    SIZES = replace(Sana.SIZES, patch=2, frame_stride=4, multiple=32, forward_values=17.1, decoder=WAN_VAE)
    TRAINS_ON_CUDNN = False
    FRAMES = "frames"

    def _denormalised(self, decoder: Any, latents: Tensor) -> Tensor:
        return denormalised(decoder, latents)


FAMILIES = {"sana": Sana, "sana_video": SanaVideo}
