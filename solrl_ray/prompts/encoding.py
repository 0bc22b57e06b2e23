"""A prompt with its reference pictures, as a model encodes it."""

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
    """`encode` of prompts, with their reference pictures at the size of the samples if the model has them.

    `files`: the contents of each prompt's pictures; None: they are read.

    Raises `UserError` for a picture that is gone or has changed.
    """
    texts = [prompt.text for prompt in prompts]
    if not model.config.references:
        return model.encode(texts, micro_batch)
    assert isinstance(model, SeesReferences)
    height, width = model.shape.height, model.shape.width
    given = [None] * len(prompts) if files is None else files
    seen = [torch.from_numpy(pictures(each, height, width, own)) for each, own in zip(prompts, given, strict=True)]
    return model.encode_seeing(texts, seen, micro_batch)
