"""Wan 2.2 TI2V and Wan 2.1 I2V, which make videos of a given picture, through the parts of diffusers checkpoints."""

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
"""Name of a picture as CLIP sees it, in an embedding."""


class WanI2V(SeesReferences, Wan):
    """Wan 2.2 TI2V with the latent of a reference picture in place of the first latent frame.

    The transformer sees it without noise, at the timestep 0. The velocity of the first frame is the one that leads
    straight to it, so a sample ends with it whatever the policy, and nothing is learned of that frame.
    """

    PIPELINE = Stock("WanImageToVideoPipeline")
    INDEX = "WanPipeline"
    LOADED_BY = "WanImageToVideoPipeline"
    # Estimated: each token has a modulation of its own, six values a channel more, in an eager block twelve.
    SIZES = replace(Wan.SIZES, references=(1, 1), adds_references=False, kept_values=(27.7, 45.9), forward_values=28.0)

    def predicted(self, latents: Tensor) -> Tensor:
        return latents[:, :, 1:]

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        picture = embedding[REFERENCE_TOKENS]
        times = (sigmas * TIMESTEPS)[:, None].expand(-1, self.image_tokens).clone()
        times[:, : math.prod(self._grid)] = 0
        velocity = self._call(
            torch.cat([picture, latents[:, :, 1:]], dim=2),
            timestep=times,
            encoder_hidden_states=embedding["prompt_embeds"],
        )
        given = (latents[:, :, :1].float() - picture.float()) / sigmas[:, None, None, None, None]
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
                f"{key} is {config.path!r}, whose videos do not begin with a given latent; model.family "
                f"{config.family!r} trains Wan-AI/Wan2.2-TI2V-5B-Diffusers."
            )
        return checkpoint


class Wan21I2V(SeesReferences, Wan):
    """Wan 2.1 I2V, which sees a picture twice: cross-attention the last but one layer of CLIP, and the transformer,
    beside the noise, the latents of a video of the picture and then grey, with `SIZES.marks` channels for its frame.

    Unlike Wan 2.2's the first frame is drawn as the others are. The stock transformer takes texts of 512 tokens only.
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
        return [text | {PICTURE: self._seen(pictures)} for text, pictures in zip(encoded, references, strict=True)]

    def _seen(self, pictures: Tensor) -> Tensor:
        """[257, width] of the published CLIP."""
        from PIL import Image

        file = Image.fromarray(pictures[0].permute(1, 2, 0).contiguous().numpy())
        seen: Tensor = self._text.pipeline.encode_image(file, self.device)
        return seen[0].to("cpu", self.dtype)

    def _tokens_of(self, pictures: Tensor) -> Tensor:
        """[marks + channels, T, H/8, W/8] in `dtype` on the CPU."""
        vae: Any = self._module("vae")
        video = torch.zeros(1, *pictures.shape[1:2], self.shape.frames, *pictures.shape[2:])
        video[:, :, 0] = pictures.float() / 255 * 2 - 1
        latents = vae.encode(video.to(self.device, self.dtype)).latent_dist.mode()
        latents = normalised(vae, latents, self.dtype)
        given = torch.zeros_like(latents[:, :1]).repeat(1, self.SIZES.marks, 1, 1, 1)
        given[:, :, 0] = 1
        return torch.cat([given, latents], dim=1)[0].cpu()

    @classmethod
    def _load_text(cls, config: Model, checkpoint: Checkpoint, dtype: torch.dtype) -> TextEncoders:
        from solrl_ray.models.components import TextEncoders

        encoders, tokenizers = cls._text_parts(config, checkpoint, dtype)
        encoders["image_encoder"] = checkpoint.load_encoder("image_encoder", dtype)
        processor = checkpoint.load_processor("image_processor")
        return TextEncoders(partial(cls.PIPELINE, image_processor=processor), encoders, tokenizers)

    @classmethod
    def text_skeletons(cls, config: Model, key: str = KEY) -> dict[str, nn.Module]:
        """Also CLIP, which encodes the prompt's picture."""
        with torch.device("meta"):
            seeing = cls._open(config, key).text_skeleton("image_encoder")
        return {"image_encoder": seeing, **super().text_skeletons(config, key)}

    @classmethod
    def _open(cls, config: Model, key: str = KEY) -> Checkpoint:
        checkpoint = super()._open(config, key)
        if not checkpoint.has("image_encoder"):
            raise UserError(
                f"{key} is {config.path!r}, which has no image encoder; model.family {config.family!r} trains "
                "checkpoints of Wan 2.1, such as Wan-AI/Wan2.1-I2V-14B-480P-Diffusers."
            )
        if checkpoint.settings("transformer").get("pos_embed_seq_len"):
            raise UserError(
                f"{key} is {config.path!r}, whose videos have a first and a last picture; model.family "
                f"{config.family!r} trains checkpoints with a first one only."
            )
        return checkpoint


FAMILIES = {"wan21_i2v": Wan21I2V, "wan_i2v": WanI2V}
