"""HPSv2 (Wu et al. 2023, arXiv 2306.09341): a CLIP ViT-H-14 fine-tuned on human preferences; v2.1 and v2.0.

The checkpoint is in open_clip's format and has all weights; the LAION checkpoint it was trained from is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import open_clip
import torch
from torch import Tensor

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import UserError
from solrl_ray.rewards import checkpoints
from solrl_ray.rewards.base import CheckpointReward, Keys
from solrl_ray.rewards.preprocessing import longest_side
from solrl_ray.rewards.texts import Texts


class HPSv2(CheckpointReward):
    """Version 2.1: cos(image, text) without a logit scale, in float32 (``hpsv2/img_score.py``).

    Each text is encoded once, alone. Preprocessing: `longest_side`.
    """

    file: ClassVar[str] = "HPS_v2.1_compressed.pt"
    architecture: ClassVar[str] = "ViT-H-14"

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        folder = self.folders(config, keys)
        weights = checkpoints.read_torch(folder, self.file, keys("path")).get("state_dict")
        if not isinstance(weights, dict):
            raise UserError(f"{keys('path')} is {config.path!r}, but {self.file} there has no 'state_dict'.")
        model: Any = open_clip.CLIP(**open_clip.get_model_config(self.architecture))
        checkpoints.fill(model, weights, folder, self.file, keys("path"))
        self._model = self._frozen(model)
        self._tokenizer = open_clip.SimpleTokenizer(context_length=model.context_length)
        self._size: int = model.visual.image_size[0]
        self._texts = Texts(name, self._text_features, self._count_tokens, model.context_length)

    @classmethod
    def folders(cls, config: RewardConfig, keys: Keys) -> Path:
        return checkpoints.folder(config.path, [(cls.file,)], keys("path"))

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        texts = self._texts(prompts)
        pixels = longest_side(images.to(self._device, torch.float32), self._size)
        return (self._model.encode_image(pixels, normalize=True) * texts).sum(dim=-1)

    def _count_tokens(self, prompt: str) -> int:
        return len(self._tokenizer.encode(prompt)) + 2

    def _text_features(self, prompt: str) -> Tensor:
        """Normalised features of a prompt, float32 [projection]."""
        features: Tensor = self._model.encode_text(self._tokenizer([prompt]).to(self._device), normalize=True)
        return features[0]


class HPSv20(HPSv2):
    """Version 2.0: another fine-tuning of the same network. Its scores are not comparable with those of v2.1."""

    file = "HPS_v2_compressed.pt"
