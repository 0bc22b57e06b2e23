"""Models that take reference images, as latents whose tokens follow those of the sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.checkpoint import fingerprint
from solrl_ray.models.libraries import no_grad, torch
from solrl_ray.records import REFERENCE_TOKENS, REFERENCES, SampleShape

if TYPE_CHECKING:
    from torch import Tensor

MEGAPIXEL = 1024**2


class SeesReferences(DiffusionModel):
    """Mixin: a base class to put before a family with packed latents.

    The family's `_velocity` gets the tokens of the sample followed by those of each reference, and predicts all of
    them; only the sample's part is used. With `model.references` 0, nothing changes.
    """

    @no_grad
    def encode_seeing(
        self, texts: Sequence[str], references: Sequence[Tensor], micro_batch: int = 1
    ) -> list[dict[str, Tensor]]:
        """Encode texts, each with its reference images, uint8 [n, 3, H, W]. Needs `models.encoder_components`.

        Returns one dict per text, as `encode` does, with the additional entries `records.REFERENCES` and
        `records.REFERENCE_TOKENS`.
        """
        encoded = self._encode_texts(texts, references, micro_batch)
        return [
            embedding | {REFERENCES: images, REFERENCE_TOKENS: self._tokens_of(images)}
            for embedding, images in zip(encoded, references, strict=True)
        ]

    @classmethod
    @contextmanager
    def stock_keeps_references(cls, shape: SampleShape) -> Iterator[None]:
        """Context in which the stock pipeline keeps references of this size, if only its code can set that."""
        yield

    def text_identity(self, micro_batch: int = 1) -> dict[str, str]:
        """See `DiffusionModel`. With references, also everything that determines the bits of their tokens."""
        identity = super().text_identity(micro_batch)
        if not self.config.references:
            return identity
        tiled = {"tiling": "true"} if self.config.decoding.tiling else {}  # references are encoded in tiles, too
        return identity | {"vae": fingerprint(self._module("vae")), "shape": str(self.shape)} | tiled

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        texts = dict(embedding)
        tokens = texts.pop(REFERENCE_TOKENS, None)
        if tokens is None:
            if self.config.references:
                raise ValueError(
                    f"model.references is {self.config.references}, but the embedding has no reference images: "
                    "encode the prompt with `encode_seeing`"
                )
            return super()._velocity(latents, sigmas, texts)  # type: ignore[safe-super]
        both = torch.cat([latents, tokens], dim=1)
        return super()._velocity(both, sigmas, texts)[:, : latents.shape[1]]  # type: ignore[safe-super]

    def _encode_texts(
        self, texts: Sequence[str], references: Sequence[Tensor], micro_batch: int
    ) -> list[dict[str, Tensor]]:
        """The embeddings from the text encoders. In some families these encoders also take the references."""
        return self.encode(texts, micro_batch)

    def _tokens_of(self, images: Tensor) -> Tensor:
        """Tokens [n · tokens, channels] of reference images in `dtype` on the CPU: the mode of the VAE's posterior.

        Each image is a separate forward, so its bits do not depend on the others.
        """
        vae: Any = self._module("vae")
        tokens = []
        for image in images[:, None]:
            pixels = (image.float() / 255 * 2 - 1).to(self.device, self.dtype)
            encoded = vae.encode(self._as_encoded(pixels))
            latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latents
            tokens.append(self._packed(self._normalised(vae, latents))[0].cpu())
        return torch.cat(tokens)

    def _as_encoded(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1], in the shape that the autoencoder takes."""
        return pixels

    def _normalised(self, vae: Any, latents: Tensor) -> Tensor:
        """The inverse of `_denormalised`, as the stock pipeline computes it."""
        settings = vae.config
        return (latents - float(settings.get("shift_factor") or 0.0)) * float(settings.get("scaling_factor") or 1.0)

    def _packed(self, latents: Tensor) -> Tensor:
        """The inverse of `_unpacked`: latent cells [B, C, H, W] → tokens [B, tokens, channels]."""
        return torch.nn.functional.pixel_unshuffle(latents, self.SIZES.patch).flatten(2).transpose(1, 2)
