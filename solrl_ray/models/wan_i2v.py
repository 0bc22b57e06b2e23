"""Wan 2.2 TI2V, whose video begins with a given picture, through the parts of a diffusers Wan checkpoint."""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline
from torch import Tensor

from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError
from solrl_ray.models import sizes
from solrl_ray.models.checkpoint import KEY, Checkpoint
from solrl_ray.models.references import SeesReferences
from solrl_ray.models.wan import TIMESTEPS, Wan, normalised
from solrl_ray.records import REFERENCE_TOKENS


class WanI2V(SeesReferences, Wan):
    """Wan 2.2 TI2V with the latent of a reference picture in place of the first latent frame.

    The transformer sees it without noise, at the timestep 0. The velocity of the first frame is the one that leads
    straight to it, so a sample ends with it whatever the policy, and nothing is learned of that frame.
    """

    PIPELINE = WanImageToVideoPipeline
    INDEX = "WanPipeline"
    SIZES = sizes.WAN_I2V

    def predicted(self, latents: Tensor) -> Tensor:
        return latents[:, :, 1:]

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        picture = embedding[REFERENCE_TOKENS]
        times = (sigmas * TIMESTEPS)[:, None].expand(-1, self.image_tokens).clone()
        times[:, : math.prod(self._grid)] = 0
        velocity: Tensor = self.transformer(
            torch.cat([picture, latents[:, :, 1:]], dim=2),
            timestep=times,
            encoder_hidden_states=embedding["prompt_embeds"],
            return_dict=False,
        )[0]
        given = (latents[:, :, :1].float() - picture.float()) / sigmas[:, None, None, None, None]
        return torch.cat([given, velocity[:, :, 1:].float()], dim=2)

    def _as_encoded(self, pixels: Tensor) -> Tensor:
        return pixels.unsqueeze(2)

    def _normalised(self, vae: Any, latents: Tensor) -> Tensor:
        return normalised(vae, latents, self.dtype)

    def _packed(self, latents: Tensor) -> Tensor:
        return latents

    @classmethod
    def _open(cls, config: Model, key: str = KEY) -> Checkpoint:
        checkpoint = super()._open(config, key)
        if not checkpoint.index.get("expand_timesteps"):
            raise UserError(
                f"{key} is {config.path!r}, whose videos do not begin with a given latent; model.family "
                f"{config.family!r} trains Wan-AI/Wan2.2-TI2V-5B-Diffusers."
            )
        return checkpoint
