"""A layer of Wan's transformer as a learner trains it."""

from __future__ import annotations

import torch
from diffusers.models.embeddings import TimestepEmbedding
from torch import Tensor


class TimeEmbedder(TimestepEmbedding):  # type: ignore[misc]
    """diffusers keeps its weights in float32; so the learner's autocast must not round what it computes."""

    def forward(self, sample: Tensor) -> Tensor:
        with torch.autocast(sample.device.type, enabled=False):
            embedded: Tensor = super().forward(sample)
        return embedded
