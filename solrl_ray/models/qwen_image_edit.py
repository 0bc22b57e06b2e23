"""Qwen-Image-Edit, through the parts of a diffusers `QwenImageEditPlusPipeline` checkpoint."""

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
"""What the pipeline writes before a prompt, of each picture."""
PICTURE_TOKENS = 196
"""Of a square picture of the pipeline's `CONDITION_IMAGE_SIZE` pixels, in the text encoder's patches of 28 × 28."""


class QwenImageEdit(SeesReferences, QwenImage):
    """Qwen-Image that sees up to three pictures twice: the text encoder as about 384² pixels before the prompt, the
    transformer as latents of the samples' size. The stock pipeline brings the latter to about 1024² pixels, whatever
    size is drawn.

    `max_sequence_length` counts the tokens of the pictures, about 200 each. Longer texts lose their end, which the
    stock pipeline would keep.
    """

    PIPELINE = Stock("QwenImageEditPlusPipeline")
    SIZES = replace(QwenImage.SIZES, references=(1, 3))

    @classmethod
    def keeps_references(cls, shape: SampleShape) -> bool:
        """The pipeline brings references to a megapixel, with sides of whole 32 pixels."""
        scale = math.sqrt(MEGAPIXEL / shape.pixels)
        return all(round(side * scale / 32) * 32 == side for side in (shape.height, shape.width))

    @classmethod
    @contextmanager
    def stock_keeps_references(cls, shape: SampleShape) -> Iterator[None]:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        usual = stock.VAE_IMAGE_SIZE
        stock.VAE_IMAGE_SIZE = shape.pixels
        try:
            yield
        finally:
            stock.VAE_IMAGE_SIZE = usual

    def text_identity(self, micro_batch: int = 1) -> dict[str, str]:
        processor = fingerprint(self._text.pipeline.processor.image_processor)
        return super().text_identity(micro_batch) | {"processor": processor}

    def _encode_texts(
        self, texts: Sequence[str], references: Sequence[Tensor], micro_batch: int
    ) -> list[dict[str, Tensor]]:
        """One by one, as `QwenImage._encode` and the stock pipeline do."""
        return [self._encode_with(text, pictures) for text, pictures in zip(texts, references, strict=True)]

    def _encode_with(self, text: str, pictures: Tensor) -> dict[str, Tensor]:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock
        from PIL import Image

        height, width = pictures.shape[2:]
        wide, high = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, width / height)
        files = [Image.fromarray(each.permute(1, 2, 0).contiguous().numpy()) for each in pictures]
        pipeline, longest = self._text.pipeline, self.config.max_sequence_length
        shown = [pipeline.image_processor.resize(file, high, wide) for file in files]
        sequence, _ = pipeline.encode_prompt(text, image=shown, device=self.device)
        batch = fixed_length([sequence[0][:longest]], longest)
        return {name: tensor[0].to("cpu", self.dtype) for name, tensor in batch.items()}

    def _shapes(self, pictures: int) -> Any:
        """Of the sample and its references."""
        return [[(1, *self._grid)] * pictures]

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
        seen = "".join(
            PICTURE.format(number + 1, "<|image_pad|>" * PICTURE_TOKENS) for number in range(config.references)
        )
        found = super().truncated(config, [seen + text for text in texts])
        return [replace(each, texts=tuple(text.removeprefix(seen) for text in each.texts)) for each in found]

    @classmethod
    def _stock(cls) -> Any:
        return cls.PIPELINE(
            **dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor", "transformer"))
        )


FAMILIES = {"qwen_image_edit": QwenImageEdit}
