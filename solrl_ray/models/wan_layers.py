"""The time embedder of Wan's transformer, safe under a learner's autocast."""

from __future__ import annotations

import torch
from diffusers.models.embeddings import TimestepEmbedding
from torch import Tensor


class TimeEmbedder(TimestepEmbedding):  # type: ignore[misc]
    """`TimestepEmbedding` without autocast. diffusers keeps its weights in float32, so a learner's autocast must not
    round its results.
    """

    def forward(self, sample: Tensor) -> Tensor:
        with torch.autocast(sample.device.type, enabled=False):
            embedded: Tensor = super().forward(sample)
        return embedded
