"""Image-to-video models Wan 2.2 TI2V and Wan 2.1 I2V, from diffusers checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError
from solrl_ray.models.checkpoint import KEY, Checkpoint, fingerprint
from solrl_ray.models.libraries import Stock, torch
from solrl_ray.models.references import SeesReferences
from solrl_ray.models.wan import TIMESTEPS, Wan, normalised
from solrl_ray.records import REFERENCE_TOKENS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from solrl_ray.models.components import TextEncoders

PICTURE = "image_embeds"
"""Key in an embedding for the image as encoded by CLIP."""


class WanI2V(SeesReferences, Wan):
    """Wan 2.2 TI2V; the latent of a reference image replaces the first latent frame.

    The transformer gets this frame without noise, at timestep 0. The velocity of the first frame is set to the one that
    leads straight to the reference. So each sample has the reference as its first frame, whatever the policy, and no
    gradient comes from that frame.
    """

    PIPELINE = Stock("WanImageToVideoPipeline")
    INDEX = "WanPipeline"
    LOADED_BY = "WanImageToVideoPipeline"
    # Estimated: each token has a separate modulation, which adds six values per channel, twelve in an eager block.
    SIZES = replace(Wan.SIZES, references=(1, 1), adds_references=False, kept_values=(27.7, 45.9), forward_values=28.0)

    def predicted(self, latents: Tensor) -> Tensor:
        return latents[:, :, 1:]

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        reference = embedding[REFERENCE_TOKENS]
        times = (sigmas * TIMESTEPS)[:, None].expand(-1, self.image_tokens).clone()
        times[:, : math.prod(self._grid)] = 0
        velocity = self._call(
            torch.cat([reference, latents[:, :, 1:]], dim=2),
            timestep=times,
            encoder_hidden_states=embedding["prompt_embeds"],
        )
        given = (latents[:, :, :1].float() - reference.float()) / sigmas[:, None, None, None, None]
        return torch.cat([given, velocity[:, :, 1:].float()], dim=2)

    def _as_encoded(self, pixels: Tensor) -> Tensor:
        return pixels.unsqueeze(2)

    def _normalised(self, vae: Any, latents: Tensor) -> Tensor:
        return normalised(vae, latents, self.dtype)

    def _packed(self, latents: Tensor) -> Tensor:
        return latents

    @classmethod
    def _open(cls, config: Model, key: str = KEY) -> Checkpoint:
        checkpoint = super()._open(config, key)
        if not checkpoint.index.get("expand_timesteps"):
            raise UserError(
                f"{key} is {config.path!r}, which does not take a given first latent frame; model.family "
                f"{config.family!r} supports checkpoints such as Wan-AI/Wan2.2-TI2V-5B-Diffusers."
            )
        return checkpoint


class Wan21I2V(SeesReferences, Wan):
    """Wan 2.1 I2V, which gets the reference image in two forms.

    Cross-attention gets the second-to-last layer of CLIP. The transformer gets additional channels next to the noisy
    latents: the latents of a video that begins with the image and is grey afterwards, and `SIZES.marks` channels that
    mark the image's frame.

    In contrast to Wan 2.2, the first frame is generated like the others. The stock transformer takes only texts of
    512 tokens.
    """

    PIPELINE = Stock("WanImageToVideoPipeline")
    SIZES = replace(Wan.SIZES, references=(1, 1), adds_references=False, marks=4, fixed_text=True)

    def text_identity(self, micro_batch: int = 1) -> dict[str, str]:
        processor = fingerprint(self._text.pipeline.image_processor)
        return super().text_identity(micro_batch) | {"processor": processor}

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        return self._call(
            torch.cat([latents, embedding[REFERENCE_TOKENS]], dim=1),
            timestep=sigmas * TIMESTEPS,
            encoder_hidden_states=embedding["prompt_embeds"],
            encoder_hidden_states_image=embedding[PICTURE],
        )

    def _encode_texts(
        self, texts: Sequence[str], references: Sequence[Tensor], micro_batch: int
    ) -> list[dict[str, Tensor]]:
        encoded = super()._encode_texts(texts, references, micro_batch)
        return [text | {PICTURE: self._clip_tokens(images)} for text, images in zip(encoded, references, strict=True)]

    def _clip_tokens(self, images: Tensor) -> Tensor:
        """CLIP's tokens of the first image, [tokens, width], in `dtype` on the CPU; the published CLIP has 257."""
        from PIL import Image

        image = Image.fromarray(images[0].permute(1, 2, 0).contiguous().numpy())
        tokens: Tensor = self._text.pipeline.encode_image(image, self.device)
        return tokens[0].to("cpu", self.dtype)

    def _tokens_of(self, images: Tensor) -> Tensor:
        """Mask and latents of the reference video, [marks + channels, T, H/8, W/8] in `dtype` on the CPU."""
        vae: Any = self._module("vae")
        video = torch.zeros(1, *images.shape[1:2], self.shape.frames, *images.shape[2:])
        video[:, :, 0] = images.float() / 255 * 2 - 1
        latents = vae.encode(video.to(self.device, self.dtype)).latent_dist.mode()
        latents = normalised(vae, latents, self.dtype)
        mask = torch.zeros_like(latents[:, :1]).repeat(1, self.SIZES.marks, 1, 1, 1)
        mask[:, :, 0] = 1
        return torch.cat([mask, latents], dim=1)[0].cpu()

    @classmethod
    def _load_text(cls, config: Model, checkpoint: Checkpoint, dtype: torch.dtype) -> TextEncoders:
        from solrl_ray.models.components import TextEncoders

        encoders, tokenizers = cls._text_parts(config, checkpoint, dtype)
        encoders["image_encoder"] = checkpoint.load_encoder("image_encoder", dtype)
        processor = checkpoint.load_processor("image_processor")
        return TextEncoders(partial(cls.PIPELINE, image_processor=processor), encoders, tokenizers)

    @classmethod
    def text_skeletons(cls, config: Model, key: str = KEY) -> dict[str, nn.Module]:
        """Text encoders, preceded by CLIP, which encodes the reference image."""
        with torch.device("meta"):
            clip = cls._open(config, key).text_skeleton("image_encoder")
        return {"image_encoder": clip, **super().text_skeletons(config, key)}

    @classmethod
    def _open(cls, config: Model, key: str = KEY) -> Checkpoint:
        checkpoint = super()._open(config, key)
        if not checkpoint.has("image_encoder"):
            raise UserError(
                f"{key} is {config.path!r}, which has no image encoder; model.family {config.family!r} supports "
                "checkpoints of Wan 2.1, such as Wan-AI/Wan2.1-I2V-14B-480P-Diffusers."
            )
        if checkpoint.settings("transformer").get("pos_embed_seq_len"):
            raise UserError(
                f"{key} is {config.path!r}, which takes a first and a last image; model.family "
                f"{config.family!r} supports checkpoints that take only a first image."
            )
        return checkpoint


FAMILIES = {"wan21_i2v": Wan21I2V, "wan_i2v": WanI2V}
