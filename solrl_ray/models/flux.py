"""The FLUX.1 family, through the parts of a diffusers `FluxPipeline` checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, AutoencoderTiny, FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from solrl_ray.models.base import DiffusionModel

PATCH = 2
"""The transformer sees 2x2 patches of the VAE's latent as tokens."""


class Flux(DiffusionModel):
    """Latents are packed as in `FluxPipeline`: [B, tokens, channels], a token is a 2x2 patch, row by row.

    Text: CLIP (pooled, 77 tokens) and T5 (sequence). The transformer takes sigma itself as timestep, rounded to
    its own dtype as in the stock pipeline, and the guidance embedding where the checkpoint has one.
    """

    FAMILY = "flux"
    PIPELINE = FluxPipeline
    TRANSFORMER = FluxTransformer2DModel
    DECODERS: ClassVar[Mapping[str, Any]] = {"AutoencoderKL": AutoencoderKL, "AutoencoderTiny": AutoencoderTiny}
    ENCODERS = ("text_encoder", "text_encoder_2")
    LONGEST = 512
    PATCH = PATCH

    def _set_up(self, transformer_config: Mapping[str, Any]) -> None:
        self.latent_shape = (self.image_tokens, int(transformer_config["in_channels"]))
        self._guided = bool(transformer_config.get("guidance_embeds", False))
        self._image_ids = image_ids(self._grid, self._grid).to(self.device)

    def _encode(self, pipeline: Any, text: str) -> dict[str, Tensor]:
        """``prompt_embeds`` [1, max_sequence_length, width], ``pooled_prompt_embeds`` [1, width]."""
        sequence, pooled, _ = pipeline.encode_prompt(
            text, device=self.device, max_sequence_length=self.config.max_sequence_length
        )
        return {"prompt_embeds": sequence, "pooled_prompt_embeds": pooled}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        guidance = None
        if self._guided:
            guidance = torch.full((len(latents),), self.config.guidance, dtype=torch.float32, device=self.device)
        sequence = embedding["prompt_embeds"]
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=sigmas.to(self.dtype),
            guidance=guidance,
            pooled_projections=embedding["pooled_prompt_embeds"],
            encoder_hidden_states=sequence,
            txt_ids=torch.zeros(sequence.shape[1], 3, device=self.device),
            img_ids=self._image_ids,
            return_dict=False,
        )[0]
        return velocity

    def _unpacked(self, latents: Tensor) -> Tensor:
        return unpack(latents, self._grid, self._grid)


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] to tokens [B, H/2 * W/2, 4C]; the inverse of `unpack`."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Tokens [B, rows * columns, 4C] to [B, C, 2 rows, 2 columns]."""
    batch, _, width = tokens.shape
    channels = width // PATCH**2
    patches = tokens.reshape(batch, rows, columns, channels, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows * PATCH, columns * PATCH)


def image_ids(rows: int, columns: int) -> Tensor:
    """Position ids of the rotary embedding, float32 [rows * columns, 3]: (0, row, column)."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).reshape(-1, 3).float()
