"""PickScore (Kirstain et al. 2023, arXiv 2305.01569): a CLIP-H fine-tuned on which of two images people picked."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from solrl_ray.rewards.clip import CLIPReward

SCALE = 26.0
"""Divisor by which Flow-GRPO and its descendants bring the score near 1."""


class PickScore(CLIPReward):
    """cos(image, text) · exp(logit_scale) / 26; multiply by 26 for the figures of the paper.

    `path` is the model, `base` the checkpoint it was trained from, which holds tokenizer and image processor.
    Images are rounded to 8 bits and resized as Pillow does, as in the published pipelines: equal pixels.
    """

    options = frozenset({"base"})

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.cosine(images, prompts) * self._model.logit_scale.exp() / SCALE
