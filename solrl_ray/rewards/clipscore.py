"""CLIPScore: the cosine between the CLIP features of an image and of its prompt (Hessel et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from solrl_ray.config.schema import RewardConfig
from solrl_ray.rewards.base import Keys
from solrl_ray.rewards.clip import CLIPReward, image_size, read_preprocessing
from solrl_ray.rewards.preprocessing import Preprocessing


class CLIPScore(CLIPReward):
    """cos(image, text) in [-1, 1]: ``logits_per_image / logit_scale`` on the diagonal.

    ``preprocessing: checkpoint`` follows the checkpoint's image processor, without rounding to 8 bits.
    ``preprocessing: torchvision`` is what the published figures of the Flow-GRPO family were made with: ``Resize``
    (bilinear, antialiased) and ``CenterCrop`` of the float tensor, whatever the checkpoint says.
    """

    options = frozenset({"preprocessing"})

    @classmethod
    def _read_preprocessing(
        cls, config: RewardConfig, folder: Path, processor: Path, keys: Keys
    ) -> Callable[[Tensor], Tensor]:
        if config.preprocessing == "torchvision":
            size = image_size(folder, keys("path"))
            return Preprocessing.torchvision(size, interpolation="bilinear", eight_bit=False)
        return read_preprocessing(processor, keys("path"), eight_bit=False)

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.cosine(images, prompts)
