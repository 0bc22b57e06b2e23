"""FLUX.1 and FLUX.1 Kontext, which edits a picture, through the parts of their diffusers checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, AutoencoderTiny, FluxKontextPipeline, FluxPipeline, FluxTransformer2DModel
from torch import Tensor
from torch.nn import functional

from solrl_ray.models import sizes
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.references import SeesReferences


class Flux(DiffusionModel):
    """Latents are packed as in `FluxPipeline`: [B, tokens, channels], a token is a 2x2 patch, row by row.

    Text: CLIP (pooled, 77 tokens) and T5 (sequence). The transformer takes sigma itself as timestep, rounded to its own
    dtype as in Sol-RL's own sampler, and the guidance embedding where the checkpoint has one. The stock pipeline rounds
    1000 sigma and then divides, which gives other values in bfloat16.
    """

    PIPELINE = FluxPipeline
    TRANSFORMER = FluxTransformer2DModel
    DECODERS: ClassVar[Mapping[str, Any]] = {"AutoencoderKL": AutoencoderKL, "AutoencoderTiny": AutoencoderTiny}
    ENCODERS = ("text_encoder", "text_encoder_2")
    SIZES = sizes.FLUX
    ROUNDS_TIMESTEPS = True

    def _set_up(self, transformer_config: Mapping[str, Any]) -> None:
        self._embeds_guidance = bool(transformer_config.get("guidance_embeds", False))

    def _set_up_shape(self, rows: int, columns: int) -> None:
        row, column = (torch.arange(count, dtype=torch.float32) for count in (rows, columns))
        self._image_ids = torch.cartesian_prod(torch.zeros(1), row, column).to(self.device)

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, max_sequence_length, width], ``pooled_prompt_embeds`` [B, width]."""
        sequence, pooled, _ = pipeline.encode_prompt(
            texts, device=self.device, max_sequence_length=self.config.max_sequence_length
        )
        return {"prompt_embeds": sequence, "pooled_prompt_embeds": pooled}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        guidance = None
        if self._embeds_guidance:
            guidance = torch.full((len(latents),), self.config.guidance, dtype=torch.float32, device=self.device)
        sequence = embedding["prompt_embeds"]
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=sigmas.to(self.dtype),
            guidance=guidance,
            pooled_projections=embedding["pooled_prompt_embeds"],
            encoder_hidden_states=sequence,
            txt_ids=torch.zeros(sequence.shape[1], 3, device=self.device),
            img_ids=self._image_ids[: latents.shape[1]],
            return_dict=False,
        )[0]
        return velocity

    def _unpacked(self, latents: Tensor) -> Tensor:
        return unpack(latents, *self._grid)


class FluxKontext(SeesReferences, Flux):
    """FLUX.1 with the tokens of one reference picture after its own. Their positions have a first number of 1, where
    those of the sample have 0. The reference has the size of the sample; the stock pipeline can be told so.
    """

    PIPELINE = FluxKontextPipeline
    SIZES = sizes.FLUX_KONTEXT

    def _set_up_shape(self, rows: int, columns: int) -> None:
        super()._set_up_shape(rows, columns)
        reference = self._image_ids + torch.tensor([1.0, 0, 0], device=self.device)
        self._image_ids = torch.cat([self._image_ids, reference])


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Tokens [B, rows * columns, 4C] to [B, C, 2 rows, 2 columns]."""
    shuffled = functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), Flux.SIZES.patch)
    # Columns last, as everywhere: in channels-last format the decoder's convolutions round differently.
    return shuffled.contiguous(memory_format=torch.contiguous_format)
