"""Models that see reference pictures: as latents, whose tokens come after those of the sample."""

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
    """Stands before a family whose latents are packed. The family's `_velocity` gets the tokens of the sample and then
    those of each picture, and answers for all; the sample's count. With `model.references` 0 it is the family itself.
    """

    @no_grad
    def encode_seeing(
        self, texts: Sequence[str], references: Sequence[Tensor], micro_batch: int = 1
    ) -> list[dict[str, Tensor]]:
        """As `encode`, of texts with each its pictures, uint8 [n, 3, H, W]. Needs `models.encoder_components`.

        Returns also `records.REFERENCES` and `records.REFERENCE_TOKENS`.
        """
        encoded = self._encode_texts(texts, references, micro_batch)
        return [
            embedding | {REFERENCES: seen, REFERENCE_TOKENS: self._tokens_of(seen)}
            for embedding, seen in zip(encoded, references, strict=True)
        ]

    @classmethod
    @contextmanager
    def stock_keeps_references(cls, shape: SampleShape) -> Iterator[None]:
        """Within it the stock pipeline takes references of this size as they are, if that is a setting of its code."""
        yield

    def text_identity(self, micro_batch: int = 1) -> dict[str, str]:
        """With references also what fixes theirs."""
        identity = super().text_identity(micro_batch)
        if not self.config.references:
            return identity
        tiled = {"tiling": "true"} if self.config.decoding.tiling else {}  # which encodes in tiles, too
        return identity | {"vae": fingerprint(self._module("vae")), "shape": str(self.shape)} | tiled

    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        others = dict(embedding)
        tokens = others.pop(REFERENCE_TOKENS, None)
        if tokens is None:
            if self.config.references:
                raise ValueError("an embedding has no reference pictures, but model.references is not 0")
            return super()._velocity(latents, sigmas, others)  # type: ignore[safe-super]
        both = torch.cat([latents, tokens], dim=1)
        return super()._velocity(both, sigmas, others)[:, : latents.shape[1]]  # type: ignore[safe-super]

    def _encode_texts(
        self, texts: Sequence[str], references: Sequence[Tensor], micro_batch: int
    ) -> list[dict[str, Tensor]]:
        """The text encoders' part; those of some families see the pictures."""
        return self.encode(texts, micro_batch)

    def _tokens_of(self, pictures: Tensor) -> Tensor:
        """[n · tokens, channels] in `dtype` on the CPU, by the most likely latents. One picture is one forward, so that
        its bits depend on no other.
        """
        vae: Any = self._module("vae")
        tokens = []
        for picture in pictures[:, None]:
            pixels = (picture.float() / 255 * 2 - 1).to(self.device, self.dtype)
            made = vae.encode(self._as_encoded(pixels))
            latents = made.latent_dist.mode() if hasattr(made, "latent_dist") else made.latents
            tokens.append(self._packed(self._normalised(vae, latents))[0].cpu())
        return torch.cat(tokens)

    def _as_encoded(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] from -1 to 1 as the autoencoder takes them."""
        return pixels

    def _normalised(self, vae: Any, latents: Tensor) -> Tensor:
        """The inverse of `_denormalised`, as the stock pipeline computes it."""
        settings = vae.config
        return (latents - float(settings.get("shift_factor") or 0.0)) * float(settings.get("scaling_factor") or 1.0)

    def _packed(self, latents: Tensor) -> Tensor:
        """The inverse of `_unpacked`: cells [B, C, H, W] to tokens [B, tokens, channels]."""
        return torch.nn.functional.pixel_unshuffle(latents, self.SIZES.patch).flatten(2).transpose(1, 2)
