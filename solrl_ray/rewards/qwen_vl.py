"""What rewards on Qwen's vision-language models share: which files they need, and a question about images as tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.rewards import checkpoints, pillow
from solrl_ray.rewards.base import CheckpointReward
from solrl_ray.rewards.preprocessing import eight_bits

DTYPE = torch.bfloat16
"""Of the network, as published. What becomes of its last layer is computed in float32."""
PROCESSOR = (
    checkpoints.CONFIG,
    checkpoints.IMAGE_PROCESSOR,
    checkpoints.CLIP_TOKENIZER,
    ("tokenizer_config.json",),
    ("chat_template.json", "chat_template.jinja", "tokenizer_config.json"),
)
"""Files of a checkpoint from which its processor is made."""


class QwenVLReward(CheckpointReward):
    """The images of a prompt are one forward without padding, so a prompt's score does not depend on other prompts.

    Images are rounded to 8 bits and resized as in Pillow to whole patches, by the rule of Qwen's image processor.
    """

    def __init__(self, name: str, processor: Any, pixels: tuple[int, int], device: torch.device | str) -> None:
        """
        Args:
            processor: Qwen's, of the checkpoint.
            pixels: smallest and largest area of a resized image.
        """
        super().__init__(name)
        self._device = torch.device(device)
        self._processor = processor
        self._pixels = pixels

    @abstractmethod
    def answer(self, images: Tensor, prompt: str) -> Tensor:
        """[B] scores of the images [B, 3, H, W] of one prompt."""

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = torch.empty(len(images))
        for prompt in dict.fromkeys(prompts):
            rows = torch.tensor([row for row, other in enumerate(prompts) if other == prompt])
            scores[rows] = self.answer(images[rows.to(images.device)], prompt).float().cpu()
        return scores

    def inputs(self, images: Tensor, question: str) -> dict[str, Tensor]:
        """The network's arguments for B images, each with the same question: its chat begins with the image."""
        picture, text = {"type": "image"}, {"type": "text", "text": question}
        chat = [{"role": "user", "content": [picture, text]}]
        asked: str = self._processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        image_processor = self._processor.image_processor
        factor = image_processor.patch_size * image_processor.merge_size
        size = smart_resize(*images.shape[2:], factor, *self._pixels)
        resized = pillow.resize(eight_bits(images.to(self._device)), size, "bicubic").to(torch.uint8)
        given = self._processor(
            images=list(resized), text=[asked] * len(images), images_kwargs={"do_resize": False}, return_tensors="pt"
        )
        return dict(given.to(self._device))


def without_special_tokens(prompt: str) -> str:
    """A prompt in which no text is read as one of Qwen's special tokens, such as ``<|image_pad|>``."""
    return prompt.replace("<|", "< |")


def load_processor(processor_class: Any, folder: Path, key: str) -> Any:
    """The processor of a checkpoint. Raises `UserError` naming `key` if it cannot be read, or has no chat template."""
    try:
        processor = processor_class.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(paths.unreadable(folder, processor_class.__name__, key, error)) from error
    if processor.chat_template is None and processor.tokenizer.chat_template is None:
        raise UserError(paths.unreadable(folder, "its chat template", key, ValueError("no file has one")))
    return processor
