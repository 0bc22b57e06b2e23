"""Qwen-Image-Edit, from diffusers `QwenImageEditPlusPipeline` checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from solrl_ray.config.schema import Model
from solrl_ray.models.checkpoint import Checkpoint, fingerprint
from solrl_ray.models.family_checkpoint import Truncation
from solrl_ray.models.libraries import Stock, torch
from solrl_ray.models.qwen_image import QwenImage, fixed_length
from solrl_ray.models.references import MEGAPIXEL, SeesReferences
from solrl_ray.records import SampleShape

if TYPE_CHECKING:
    from torch import Tensor

    from solrl_ray.models.components import TextEncoders

PICTURE = "Picture {}: <|vision_start|>{}<|vision_end|>"
"""Text that the pipeline puts before a prompt, once per reference image."""
PICTURE_TOKENS = 196
"""Tokens of a square reference of `CONDITION_IMAGE_SIZE` pixels (pipeline), in 28 × 28 patches (text encoder)."""


class QwenImageEdit(SeesReferences, QwenImage):
    """Qwen-Image with up to three reference images.

    The text encoder gets each image before the prompt, resized to about 384² pixels. The transformer gets latents of
    the images in the samples' size. The stock pipeline resizes the latter to about 1024² pixels, whatever the size of
    samples.

    `max_sequence_length` includes the tokens of the images, about 200 per image. Longer texts are truncated, which the
    stock pipeline does not do.
    """

    PIPELINE = Stock("QwenImageEditPlusPipeline")
    SIZES = replace(QwenImage.SIZES, references=(1, 3))

    @classmethod
    def keeps_references(cls, shape: SampleShape) -> bool:
        """The pipeline resizes references to about one megapixel, with sides that are multiples of 32 pixels."""
        scale = math.sqrt(MEGAPIXEL / shape.pixels)
        return all(round(side * scale / 32) * 32 == side for side in (shape.height, shape.width))

    @classmethod
    @contextmanager
    def stock_keeps_references(cls, shape: SampleShape) -> Iterator[None]:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        default = stock.VAE_IMAGE_SIZE
        stock.VAE_IMAGE_SIZE = shape.pixels
        try:
            yield
        finally:
            stock.VAE_IMAGE_SIZE = default

    def text_identity(self, micro_batch: int = 1) -> dict[str, str]:
        processor = fingerprint(self._text.pipeline.processor.image_processor)
        return super().text_identity(micro_batch) | {"processor": processor}

    def _encode_texts(
        self, texts: Sequence[str], references: Sequence[Tensor], micro_batch: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts one by one, as `QwenImage._encode` and the stock pipeline do."""
        return [self._encode_with(text, images) for text, images in zip(texts, references, strict=True)]

    def _encode_with(self, text: str, images: Tensor) -> dict[str, Tensor]:
        """Encode one text with its reference images, uint8 [n, 3, H, W]."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock
        from PIL import Image

        height, width = images.shape[2:]
        wide, high = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, width / height)
        full = [Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()) for image in images]
        pipeline, longest = self._text.pipeline, self.config.max_sequence_length
        small = [pipeline.image_processor.resize(image, high, wide) for image in full]
        sequence, _ = pipeline.encode_prompt(text, image=small, device=self.device)
        batch = fixed_length([sequence[0][:longest]], longest)
        return {name: tensor[0].to("cpu", self.dtype) for name, tensor in batch.items()}

    def _shapes(self, images: int) -> Any:
        """The transformer's argument for the shapes of the sample and its references: frames, rows, columns of each."""
        return [[(1, *self._grid)] * images]

    def _as_encoded(self, pixels: Tensor) -> Tensor:
        return pixels.unsqueeze(2)  # one frame

    def _normalised(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = (latents.new_tensor(vae.config[f"latents_{name}"])[:, None, None] for name in ("mean", "std"))
        return (latents[:, :, 0] - mean) / std

    @classmethod
    def _load_text(cls, config: Model, checkpoint: Checkpoint, dtype: torch.dtype) -> TextEncoders:
        from solrl_ray.models.components import TextEncoders

        processor = checkpoint.load_processor("processor")
        encoders, tokenizers = cls._text_parts(config, checkpoint, dtype)
        return TextEncoders(partial(cls.PIPELINE, processor=processor), encoders, tokenizers)

    @classmethod
    def truncated(cls, config: Model, texts: Sequence[str]) -> list[Truncation]:
        prefix = "".join(
            PICTURE.format(number + 1, "<|image_pad|>" * PICTURE_TOKENS) for number in range(config.references)
        )
        truncations = super().truncated(config, [prefix + text for text in texts])
        return [replace(each, texts=tuple(text.removeprefix(prefix) for text in each.texts)) for each in truncations]

    @classmethod
    def _stock(cls) -> Any:
        return cls.PIPELINE(
            **dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor", "transformer"))
        )


FAMILIES = {"qwen_image_edit": QwenImageEdit}
