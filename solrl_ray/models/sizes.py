"""The sizes of a family, without PyTorch: tokens, latents, and the activations of a backward pass."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from solrl_ray.errors import UserError
from solrl_ray.models.shapes import DTYPE_BYTES, TEXT_WIDTHS
from solrl_ray.records import SampleShape

if TYPE_CHECKING:
    from solrl_ray.config.schema import Model

CLIP_TOKENS = 77
CLIP_PICTURE = 257 * 1280
"""Values of a picture as ViT-H sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes of an autoencoder in bfloat16, as counted by `benchmarks/activation_sizes.py`."""

    parameters: int
    """Includes its encoder, which is loaded as well."""
    bytes_a_pixel: int
    """Peak while an image is decoded."""


KL = DecoderSizes(parameters=83_819_683, bytes_a_pixel=1536)
"""Of `AutoencoderKL` with 16 channels, which several families have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySizes:
    """What all checkpoints of a family have in common."""

    patch: int
    """Latent cells a side of one image token."""
    longest: int
    """Largest `model.max_sequence_length` that the stock pipeline takes."""
    fixed_text: bool = False
    """Whether it takes no other one."""
    packed: bool
    """Whether the transformer takes image tokens, not an image of latent cells."""
    clip: bool = False
    """Whether the tokens of CLIP come before those of the long text encoder."""
    text_in_blocks: bool = True
    """Whether the blocks transform the text as well; if not, they attend to it."""
    text_multiple: int = 1
    """Texts are padded to a multiple of this many tokens."""
    width: tuple[str, ...] = ("num_attention_heads", "attention_head_dim")
    """Keys of ``config.json`` whose product is a token's channels inside the transformer."""
    positions: str = ""
    """Key of ``config.json`` with the limit of positions: image tokens a side, or a list of the limits of text, rows
    and columns. Empty: no limit.
    """
    schedules: tuple[str, ...] = ()
    """Each `model.schedule.kind` that the stock pipeline supports; empty: all."""
    frame_stride: int = 0
    """Frames that each latent frame after the first makes; 0: the family makes pictures."""
    multiple: int = 1
    """Pixels of which the stock pipeline takes multiples, if those of the latent grid are not enough."""
    kept_values: tuple[float, float] | None = None
    """Values that a block's forward keeps for its backward pass, per channel of an image or text token: of compiled
    blocks, of eager ones. Measured; for estimates of memory. None: not measured.
    """
    forward_values: float | None = None
    """Peak of values in a forward without gradient, per channel of such a token: of eager blocks, as counted by
    `benchmarks/activation_sizes.py`. Compiled ones hold less. None: not counted.
    """
    decoder: DecoderSizes | None = None
    """Of the autoencoder, for estimates of memory; None: not counted."""
    references: tuple[int, int] = (0, 0)
    """Fewest and most reference pictures of a prompt."""
    adds_references: bool = True
    """Whether the tokens of references come after those of the sample; else they are in place of some, or channels."""
    marks: int = 0
    """Channels that say which latent frames are given, if the transformer gets these and given latents of all frames
    beside the sample's.
    """
    other_decoders: Mapping[int, DecoderSizes] = field(default_factory=dict)
    """By VAE downscale factor, of checkpoints with another one."""

    @property
    def estimate_memory(self) -> bool:
        """Whether the numbers for estimates of memory are known; if not, the estimates are 0."""
        return None not in (self.kept_values, self.forward_values, self.decoder)

    def check(
        self, config: Model, transformer: Mapping[str, Any], factor: int, named: Callable[[str], str] = str
    ) -> None:
        """Raise `UserError` for sizes that a checkpoint does not support.

        Args:
            transformer: its ``config.json``.
            factor: VAE downscale factor.
            named: how messages name a key, such as with its source.
        """
        cell, step = factor * self.patch, self.step(factor)
        sides = {side for shape in config.shapes for side in (shape.height, shape.width)}
        if wrong := sorted(side for side in sides if side % step):
            below = {side: side // step * step for side in wrong}
            near = (f"to {s} are {b} and {b + step}" if b else f"to {s} is {step}" for s, b in below.items())
            raise UserError(
                f"{named('model.resolution')} is {json.dumps(config.resolution)}, but {config.path} needs a "
                f"multiple of {step} for each side; the nearest {', '.join(near)}."
            )
        self._check_frames(config, named)
        if self.schedules and config.schedule.kind not in self.schedules:
            raise UserError(
                f"{named('model.schedule.kind')} is {config.schedule.kind!r}, but the pipeline of model.family "
                f"{config.family!r} has the noise levels of {' or '.join(map(repr, self.schedules))}."
            )
        if self.fixed_text and config.max_sequence_length != self.longest:
            raise UserError(
                f"{named('model.max_sequence_length')} is {config.max_sequence_length}, but the transformer of "
                f"model.family {config.family!r} takes {self.longest}."
            )
        if config.max_sequence_length > self.longest:
            raise UserError(
                f"{named('model.max_sequence_length')} is {config.max_sequence_length}, "
                f"but model.family {config.family!r} takes at most {self.longest}."
            )
        if self.positions:
            self._check_positions(config, transformer[self.positions], cell, named)
        if why := self.why_not_references(config):
            raise UserError(f"{named('model.references')} is {config.references}, but {why}.")

    def why_not_references(self, config: Model) -> str:
        """What the family takes, if it is not `model.references`; else empty."""
        least, most = self.references
        if least <= config.references <= most:
            return ""
        right = f"takes {least}" if least == most else f"takes {least} to {most}"
        return f"model.family {config.family!r} {right if most else 'takes no reference pictures: leave it out'}"

    def _check_frames(self, config: Model, named: Callable[[str], str]) -> None:
        stride, frames = self.frame_stride, config.frames
        if not stride and frames:
            raise UserError(
                f"{named('model.frames')} is {frames}, but model.family {config.family!r} makes pictures; leave it out."
            )
        if stride and not frames:
            raise UserError(
                f"model.frames is missing: model.family {config.family!r} makes videos of 1 + a multiple of {stride} "
                f"frames, such as {12 * stride + 1}."
            )
        if frames and (frames - 1) % stride:
            lower = (frames - 1) // stride * stride + 1
            right = f"{lower} or {lower + stride}" if lower > 1 else str(lower + stride)
            raise UserError(
                f"{named('model.frames')} is {frames}, but {config.path} makes 1 + a multiple of {stride}, "
                f"such as {right}."
            )

    def _check_positions(self, config: Model, end: int | Sequence[int], step: int, named: Callable[[str], str]) -> None:
        text, *sides = (None, end, end) if isinstance(end, int) else end
        height, width = (side * step for side in sides)
        if any(shape.height > height or shape.width > width for shape in config.shapes):
            raise UserError(
                f"{named('model.resolution')} is {json.dumps(config.resolution)}, but the positions of "
                f"{config.path} end at {SampleShape(height, width)}."
            )
        if text is None:
            return
        # A text's tokens have the positions from 1 on, the image the one after them.
        longest = (text - 2) // self.text_multiple * self.text_multiple
        if config.max_sequence_length > longest:
            raise UserError(
                f"{named('model.max_sequence_length')} is {config.max_sequence_length}, "
                f"but the positions of {config.path} end at {longest}."
            )

    def step(self, factor: int) -> int:
        """Pixels of which a sample's sides are multiples."""
        return math.lcm(factor * self.patch, self.multiple)

    def decoder_of(self, factor: int) -> DecoderSizes:
        """Sizes of an autoencoder with this downscale factor."""
        known = self.other_decoders.get(factor, self.decoder)
        return known or DecoderSizes(parameters=0, bytes_a_pixel=0)

    def latent_frames(self, shape: SampleShape) -> int:
        """Latent frames of one sample; 1 of a picture."""
        return 1 + (shape.frames - 1) // self.frame_stride if shape.frames else 1

    def frames(self, latent_frames: int) -> int:
        """Frames of a video that so many latent frames are decoded to."""
        return 1 + (latent_frames - 1) * self.frame_stride

    def image_grid(self, shape: SampleShape, factor: int) -> tuple[int, int]:
        """Rows and columns of one sample's image tokens, of a video of each latent frame's."""
        step = factor * self.patch
        return shape.height // step, shape.width // step

    def image_tokens(self, shape: SampleShape, factor: int) -> int:
        """Image tokens of one sample, of all its frames."""
        return self.latent_frames(shape) * math.prod(self.image_grid(shape, factor))

    def text_tokens(self, config: Model) -> int:
        """Text tokens in the sequence that the blocks transform beside the image's."""
        own = math.ceil(config.max_sequence_length / self.text_multiple) * self.text_multiple
        return (own + CLIP_TOKENS * self.clip) * self.text_in_blocks

    def tokens(self, config: Model, shape: SampleShape, factor: int) -> int:
        """Tokens of one sample that the blocks transform, with those of its references."""
        added = config.references if self.adds_references else 0
        return self.image_tokens(shape, factor) * (1 + added) + self.text_tokens(config)

    def latent_shape(self, shape: SampleShape, transformer: Mapping[str, Any], factor: int) -> tuple[int, ...]:
        """Shape of one sample's state as the transformer takes it, without the batch dimension."""
        channels = self._channels(transformer)
        if self.packed:
            return self.image_tokens(shape, factor), channels
        frames = (self.latent_frames(shape),) if self.frame_stride else ()
        return channels, *frames, shape.height // factor, shape.width // factor

    def _channels(self, transformer: Mapping[str, Any]) -> int:
        """Of a sample's latents as the transformer takes them."""
        channels = int(transformer["in_channels"])
        return (channels - self.marks) // 2 if self.marks else channels

    def embedding_bytes(self, config: Model, transformer: Mapping[str, Any], factor: int) -> int:
        """Of a text and its references, on disk and in memory."""
        tokens = self.text_tokens(config) or config.max_sequence_length
        width = next(int(transformer[key]) for key in TEXT_WIDTHS if transformer.get(key))
        pooled = int(transformer.get("pooled_projection_dim") or 0)
        shape = config.shapes.largest
        cells = math.prod(self.image_grid(shape, factor)) * (1 if self.packed else self.patch**2)
        latents = config.references * cells * int(transformer["in_channels"])
        if self.marks:
            added = int(transformer["in_channels"]) - self._channels(transformer)
            latents = cells * added * self.latent_frames(shape) + CLIP_PICTURE
        pixels = config.references * 3 * shape.pixels
        return (tokens * width + pooled + latents) * DTYPE_BYTES[config.dtype] + pixels

    def activation_bytes(
        self, config: Model, transformer: Mapping[str, Any], factor: int, *, blocks: int, compiled: bool
    ) -> tuple[int, int]:
        """Estimates of what a transformer of `blocks` blocks keeps of the largest sample for a backward pass: bytes if
        they recompute everything (their inputs, and one block's activations at a time), and if they recompute nothing.
        """
        inputs = blocks * self._stream_bytes(config, transformer, factor)
        if self.kept_values is None:
            return 0, 0
        most = round(self.kept_values[0 if compiled else 1] * inputs)
        return inputs + most // max(1, blocks), most

    def sampling_bytes(self, config: Model, transformer: Mapping[str, Any], factor: int) -> tuple[int, int]:
        """Estimates of a worker's peak without gradients: bytes of the largest sample's forward, of
        the largest image's decoding.
        """
        forward = round((self.forward_values or 0.0) * self._stream_bytes(config, transformer, factor))
        decoding = self.decoder_of(factor).bytes_a_pixel * config.shapes.largest.pixels
        return forward, decoding * DTYPE_BYTES[config.dtype] // 2

    def _stream_bytes(self, config: Model, transformer: Mapping[str, Any], factor: int) -> int:
        """The largest sample's tokens between blocks."""
        width = math.prod(int(transformer[key]) for key in self.width)
        return self.tokens(config, config.shapes.largest, factor) * width * DTYPE_BYTES[config.dtype]
