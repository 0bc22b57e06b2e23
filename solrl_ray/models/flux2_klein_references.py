"""FLUX.2 [klein] with reference pictures: the same checkpoints, the same pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from solrl_ray.models.flux2_klein import Flux2Klein
from solrl_ray.models.references import SeesReferences

APART = 10
"""Distance of pictures in the first number of a position, of which the sample has 0."""


class Flux2KleinSeeing(SeesReferences, Flux2Klein):
    """Pictures of the samples' size; the stock pipeline reduces larger ones than 1024² pixels."""

    def _set_up_shape(self, rows: int, columns: int) -> None:
        super()._set_up_shape(rows, columns)
        own = self._image_ids
        others = [
            own + torch.tensor([APART * (n + 1), 0, 0, 0], device=own.device) for n in range(self.config.references)
        ]
        self._image_ids = torch.cat([own, *others])

    def _normalised(self, vae: Any, latents: Tensor) -> Tensor:
        """Patches, each channel by the running statistics of the autoencoder."""
        patches = functional.pixel_unshuffle(latents, self.SIZES.patch)
        mean, variance = vae.bn.running_mean, vae.bn.running_var
        deviation = torch.sqrt(variance + vae.config["batch_norm_eps"])
        return (patches - mean.to(latents)[:, None, None]) / deviation.to(latents)[:, None, None]

    def _packed(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).transpose(1, 2)
