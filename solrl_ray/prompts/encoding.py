"""Encodes prompts, together with their reference images if the model takes any."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.references import SeesReferences
from solrl_ray.prompts.references import pictures
from solrl_ray.records import Prompt


def encode_prompts(
    model: DiffusionModel,
    prompts: Sequence[Prompt],
    micro_batch: int = 1,
    files: Sequence[Sequence[bytes]] | None = None,
) -> list[dict[str, Tensor]]:
    """Encode prompts with the model. If the model takes reference images, they are scaled to the size of the samples.

    `files`: contents of the image files of each prompt; None: read them.

    Raises `UserError` if an image is missing or has changed.
    """
    texts = [prompt.text for prompt in prompts]
    if not model.config.references:
        return model.encode(texts, micro_batch)
    assert isinstance(model, SeesReferences)
    height, width = model.shape.height, model.shape.width
    given = [None] * len(prompts) if files is None else files
    images = [
        torch.from_numpy(pictures(prompt, height, width, own)) for prompt, own in zip(prompts, given, strict=True)
    ]
    return model.encode_seeing(texts, images, micro_batch)
