"""Qwen-Image, through the parts of a diffusers `QwenImagePipeline` checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from torch import Tensor
from torch.nn import functional

from solrl_ray.models import attention, sizes
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.flux import unpack


class QwenImage(DiffusionModel):
    """Latents are packed as in the pipeline: [B, tokens, 64], a token is a 2x2 patch, row by row.

    Text: the last hidden layer of Qwen2.5-VL, the prompt inside its template, whose first 34 tokens are cut off after
    encoding. A text is padded with masked zeros to `max_sequence_length` tokens, as the stock pipeline does with the
    shorter texts of a batch. Positions of the image do not depend on the text's length. The timestep is sigma, rounded
    to the transformer's dtype. The autoencoder is a video one, used with one frame.
    """

    PIPELINE = QwenImagePipeline
    TRANSFORMER = QwenImageTransformer2DModel
    DECODERS: ClassVar[Mapping[str, Any]] = {"AutoencoderKLQwenImage": AutoencoderKLQwenImage}
    ENCODERS = ("text_encoder",)
    SIZES = sizes.QWEN_IMAGE
    ROUNDS_TIMESTEPS = True

    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` [B, max_sequence_length, width], ``prompt_embeds_mask`` [B, max_sequence_length].

        One by one: the pipeline pads the texts of a batch to the longest of them, so the shape would depend on it.
        """
        longest = self.config.max_sequence_length
        options = {"device": self.device, "max_sequence_length": longest}
        return fixed_length([pipeline.encode_prompt(text, **options)[0][0] for text in texts], longest)

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        sequence, mask = embedding["prompt_embeds"], embedding["prompt_embeds_mask"]
        if latents.is_cuda and attention.is_memory_efficient():
            sequence, mask = attention.padded_text(sequence, mask, beside=self.image_tokens)
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=sigmas.to(self.dtype),
            encoder_hidden_states=sequence,
            encoder_hidden_states_mask=mask,
            img_shapes=(1, *self._grid),  # frames, rows, columns
            return_dict=False,
        )[0]
        return velocity

    def _combined(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Each token gets the norm that it has without guidance, as in the pipeline."""
        guided = super()._combined(positive, negative, scale)
        return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def _unpacked(self, latents: Tensor) -> Tensor:
        return unpack(latents, *self._grid)

    def _denormalised(self, decoder: Any, latents: Tensor) -> Tensor:
        mean, std = (latents.new_tensor(decoder.config[f"latents_{name}"])[:, None, None] for name in ("mean", "std"))
        return (latents * std + mean).unsqueeze(2)

    def _decode(self, decoder: Any, latents: Tensor) -> Tensor:
        return super()._decode(decoder, latents)[:, :, 0]

    @classmethod
    def _token_counts(cls, tokenizer: Any, texts: Sequence[str]) -> list[int]:
        parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
        stock = QwenImagePipeline(**parts)
        whole = super()._token_counts(tokenizer, [stock.prompt_template_encode.format(text) for text in texts])
        return [count - stock.prompt_template_encode_start_idx for count in whole]


def fixed_length(texts: Sequence[Tensor], tokens: int) -> dict[str, Tensor]:
    """Texts [n, width], each padded with zeros to `tokens` tokens, and the masks [B, tokens] of their own n.

    Raises `ValueError` if one is longer.
    """
    lengths = [len(text) for text in texts]
    if max(lengths) > tokens:
        raise ValueError(f"a text of {max(lengths)} tokens does not fit into {tokens}")
    padded = [functional.pad(text, (0, 0, 0, tokens - len(text))) for text in texts]
    mask = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    return {"prompt_embeds": torch.stack(padded), "prompt_embeds_mask": mask}
