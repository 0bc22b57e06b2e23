"""FLUX.1 Kontext, which edits a picture, through the parts of a diffusers `FluxKontextPipeline` checkpoint."""

from __future__ import annotations

import torch
from diffusers import FluxKontextPipeline

from solrl_ray.models import sizes
from solrl_ray.models.flux import Flux
from solrl_ray.models.references import SeesReferences


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
