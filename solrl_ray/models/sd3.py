"""Stable Diffusion 3 and 3.5, through the parts of a diffusers `StableDiffusion3Pipeline` checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, AutoencoderTiny, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor
from torch.nn import functional

from solrl_ray.models import sizes
from solrl_ray.models.base import DiffusionModel

TIMESTEPS = 1000
"""Of the diffusion time that the transformer was trained with: its timestep is sigma times this."""


class StableDiffusion3(DiffusionModel):
    """Latents [B, 16, H/8, W/8].

    Text: two CLIP encoders (77 tokens, concatenated in width) followed by T5 tokens; without T5 these are zeros. The
    timestep is sigma · 1000 in float32, never truncated. The published sampler rounded it down to a whole number and
    the published training did not; here both use the same value.
    """

    PIPELINE = StableDiffusion3Pipeline
    TRANSFORMER = SD3Transformer2DModel
    DECODERS: ClassVar[Mapping[str, Any]] = {"AutoencoderKL": AutoencoderKL, "AutoencoderTiny": AutoencoderTiny}
    ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
    OPTIONAL = frozenset({"text_encoder_3"})
    SIZES = sizes.SD3
    TRAINS_ON_CUDNN = True

    def _set_up(self, transformer_config: Mapping[str, Any]) -> None:
        self._text_width = int(transformer_config["joint_attention_dim"])

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, 77 + max_sequence_length, width], ``pooled_prompt_embeds`` [B, width]."""
        if pipeline.text_encoder_3 is None:
            return self._encode_without_t5(pipeline, texts)
        sequence, _, pooled, _ = pipeline.encode_prompt(
            texts,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_sequence_length,
        )
        return {"prompt_embeds": sequence, "pooled_prompt_embeds": pooled}

    def _encode_without_t5(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """As `encode_prompt`, which would ask a transformer for the width of T5."""
        clips = [pipeline._get_clip_prompt_embeds(texts, device=self.device, clip_model_index=i) for i in (0, 1)]
        sequence = torch.cat([clip[0] for clip in clips], dim=-1)
        sequence = functional.pad(sequence, (0, self._text_width - sequence.shape[-1]))
        t5 = sequence.new_zeros(len(texts), self.config.max_sequence_length, self._text_width)
        pooled = torch.cat([clip[1] for clip in clips], dim=-1)
        return {"prompt_embeds": torch.cat([sequence, t5], dim=1), "pooled_prompt_embeds": pooled}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=sigmas * TIMESTEPS,
            encoder_hidden_states=embedding["prompt_embeds"],
            pooled_projections=embedding["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity
