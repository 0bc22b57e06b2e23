"""The LAION aesthetic predictor, version 2: predicts people's rating of an image, independent of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPVisionModelWithProjection

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.models import paths
from solrl_ray.records import SampleShape
from solrl_ray.rewards import checkpoints
from solrl_ray.rewards.base import CheckpointReward, Keys
from solrl_ray.rewards.clip import check_sizes, clip_folder, read_preprocessing

FILE = "sac+logos+ava1-l14-linearMSE.pth"
SOURCE = (
    "https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/sac%2Blogos%2Bava1-l14-linearMSE.pth"
)
WIDTHS = (1024, 128, 64, 16, 1)
DROPOUT_AFTER = {1024: 0.2, 128: 0.2, 64: 0.1}


class ScoreHead(nn.Module):
    """Linear layers features-1024-128-64-16-1 without activations, as published; ImageReward has the same head.

    Parameters have the published names.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((features, *WIDTHS), WIDTHS, strict=False):
            layers.append(nn.Linear(inputs, outputs))
            if outputs in DROPOUT_AFTER:
                layers.append(nn.Dropout(DROPOUT_AFTER[outputs]))
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """Scores [B] of features [B, features]."""
        scores: Tensor = self.layers(features)
        return scores.squeeze(-1)


class Aesthetic(CheckpointReward):
    """A `ScoreHead` on normalised CLIP-L/14 image features: a rating from about 1 to 10, in float32.

    `path` is the folder of the head, `base` the CLIP model. Images are rounded to 8 bits and resized as in Pillow.
    """

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        folder, clip = self.folders(config, keys)
        self._preprocessing = read_preprocessing(clip, keys("base"), eight_bit=True)
        model = paths.load_weights(CLIPVisionModelWithProjection, clip, keys("base"), dtype=torch.float32)
        head = ScoreHead(model.config.projection_dim)
        checkpoints.fill(head, checkpoints.read_torch(folder, FILE, keys("path")), folder, FILE, keys("path"))
        self._clip, self._head = self._frozen(model), self._frozen(head)

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        _, clip = cls.folders(config, keys)
        preprocessing = read_preprocessing(clip, keys("base"), eight_bit=True)
        check_sizes(preprocessing, clip, keys("base"), shapes)

    @classmethod
    def folders(cls, config: RewardConfig, keys: Keys) -> tuple[Path, Path]:
        """Folders of the head and of the CLIP model."""
        needed = [checkpoints.CONFIG, checkpoints.TRANSFORMERS_WEIGHTS, checkpoints.IMAGE_PROCESSOR]
        clip = clip_folder(config.base, needed, keys("base"), config.kind)
        return checkpoints.folder(config.path, [(FILE,)], keys("path"), source=SOURCE), clip

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pixels = self._preprocessing(images.to(self._device, torch.float32))
        scores: Tensor = self._head(F.normalize(self._clip(pixel_values=pixels).image_embeds, dim=-1))
        return scores
