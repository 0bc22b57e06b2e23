"""What a family's sizes follow from, without PyTorch: tokens, latents, and the activations of a backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from solrl_ray.config.arithmetic import DTYPE_BYTES
from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError

CLIP_TOKENS = 77


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySizes:
    """What all checkpoints of a family have in common."""

    family: str
    patch: int
    """Latent cells a side of one image token."""
    longest: int
    """Largest `model.max_sequence_length` that the stock pipeline takes."""
    packed: bool
    """Whether the transformer takes image tokens, and not an image of latent cells."""
    clip: bool = False
    """Whether the tokens of CLIP come before those of the long text encoder."""
    text_in_blocks: bool = True
    """Whether the blocks transform the text as well; else they attend to it."""
    positions: bool = False
    """Whether positions end where the checkpoint's table of them does (`pos_embed_max_size`)."""
    kept_values: tuple[float, float]
    """Values that a block's forward keeps for its backward pass, a channel of an image or text token: of compiled
    blocks, of eager ones. Measured; for estimates of memory."""

    def check(self, config: Model, transformer: Mapping[str, Any], factor: int) -> None:
        """Raise `UserError` for sizes that a checkpoint cannot do.

        Args:
            transformer: its ``config.json``.
            factor: pixels a latent cell and side.
        """
        step = factor * self.patch
        if config.resolution % step:
            raise UserError(f"model.resolution is {config.resolution}, but {config.path} needs a multiple of {step}.")
        if config.max_sequence_length > self.longest:
            raise UserError(
                f"model.max_sequence_length is {config.max_sequence_length}, "
                f"but model.family {self.family!r} takes at most {self.longest}."
            )
        largest = int(transformer["pos_embed_max_size"]) * step if self.positions else config.resolution
        if config.resolution > largest:
            raise UserError(
                f"model.resolution is {config.resolution}, but the positions of {config.path} end at {largest}."
            )

    def image_tokens(self, config: Model, factor: int) -> int:
        return (config.resolution // factor // self.patch) ** 2

    def text_tokens(self, config: Model) -> int:
        """Text tokens in the sequence that the blocks transform beside the image's."""
        return (config.max_sequence_length + CLIP_TOKENS * self.clip) * self.text_in_blocks

    def latent_shape(self, config: Model, transformer: Mapping[str, Any], factor: int) -> tuple[int, ...]:
        """Shape of one sample's state as the transformer takes it, without the batch dimension."""
        channels, cells = int(transformer["in_channels"]), config.resolution // factor
        return (self.image_tokens(config, factor), channels) if self.packed else (channels, cells, cells)

    def activation_bytes(
        self, config: Model, transformer: Mapping[str, Any], factor: int, *, blocks: int, compiled: bool
    ) -> tuple[int, int]:
        """Estimates of what a transformer of so many blocks keeps of one sample for a backward pass: bytes if they
        compute all again (their inputs, and one block's activations when its turn comes), and if they compute nothing
        again."""
        width = math.prod(int(transformer[key]) for key in ("num_attention_heads", "attention_head_dim"))
        tokens = self.image_tokens(config, factor) + self.text_tokens(config)
        inputs = blocks * tokens * width * DTYPE_BYTES[config.dtype]
        most = round(self.kept_values[0 if compiled else 1] * inputs)
        return inputs + most // max(1, blocks), most


FLUX = FamilySizes(family="flux", patch=2, longest=512, packed=True, kept_values=(13.0, 16.4))
FLUX2_KLEIN = FamilySizes(  # activations as of FLUX.1: not measured
    family="flux2_klein", patch=2, longest=512, packed=True, kept_values=(13.0, 16.4)
)
SANA = FamilySizes(family="sana", patch=1, longest=300, packed=False, text_in_blocks=False, kept_values=(29.6, 37.5))
SD3 = FamilySizes(family="sd3", patch=2, longest=512, packed=False, clip=True, positions=True, kept_values=(14.4, 22.5))
FAMILY_SIZES = {sizes.family: sizes for sizes in (FLUX, FLUX2_KLEIN, SANA, SD3)}
"""By ``model.family``."""
