"""Sizes of a family, computed without PyTorch: tokens, latents, and memory of activations."""

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
"""Number of values in CLIP ViT-H's encoding of an image: 257 tokens of 1280 channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes of an autoencoder in bfloat16, counted by `benchmarks/activation_sizes.py`."""

    parameters: int
    """Number of parameters, including the encoder, which is also loaded."""
    bytes_a_pixel: int
    """Peak memory per pixel while an image is decoded, bytes."""


KL = DecoderSizes(parameters=83_819_683, bytes_a_pixel=1536)
"""Sizes of `AutoencoderKL` with 16 channels, which several families use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySizes:
    """Sizes and limits that all checkpoints of a family share."""

    patch: int
    """Latent cells per side of one image token."""
    longest: int
    """Largest `model.max_sequence_length` that the stock pipeline accepts."""
    fixed_text: bool = False
    """Whether `longest` is the only length that it accepts."""
    packed: bool
    """Whether the transformer takes a sequence of image tokens, not an image of latent cells."""
    clip: bool = False
    """Whether CLIP's tokens precede those of the long text encoder."""
    text_in_blocks: bool = True
    """Whether the blocks transform the text tokens too; otherwise they only attend to them."""
    text_multiple: int = 1
    """Texts are padded to a multiple of this many tokens."""
    width: tuple[str, ...] = ("num_attention_heads", "attention_head_dim")
    """Keys of ``config.json`` whose product is the number of channels of a token inside the transformer."""
    positions: str = ""
    """Key of ``config.json`` with the limits of positions: image tokens per side, or a list of the limits for text,
    rows and columns. Empty: no limit.
    """
    schedules: tuple[str, ...] = ()
    """Values of `model.schedule.kind` that the stock pipeline supports; empty: all."""
    frame_stride: int = 0
    """Frames per latent frame after the first one; 0 if the family generates images."""
    multiple: int = 1
    """Sides of a sample must be multiples of this many pixels, in addition to the multiples that the latent grid needs.
    """
    kept_values: tuple[float, float] | None = None
    """Number of values that a block's forward keeps for its backward pass, per channel of an image or text token:
    (compiled blocks, eager blocks). Measured; used for estimates of memory. None: not measured.
    """
    forward_values: float | None = None
    """Peak number of values in a forward without gradient, per channel of such a token, for eager blocks. Counted by
    `benchmarks/activation_sizes.py`. Compiled blocks need less. None: not counted.
    """
    decoder: DecoderSizes | None = None
    """Sizes of the autoencoder, for estimates of memory. None: not counted."""
    references: tuple[int, int] = (0, 0)
    """Smallest and largest number of reference images per prompt."""
    adds_references: bool = True
    """Whether the tokens of references follow those of the sample. Otherwise they replace some tokens, or are added as
    channels.
    """
    marks: int = 0
    """Number of mask channels that mark the given latent frames, for transformers that take this mask and the given
    latents as channels in addition to the sample's. 0: no such input.
    """
    other_decoders: Mapping[int, DecoderSizes] = field(default_factory=dict)
    """VAE downscale factor → sizes of the autoencoder, for checkpoints with another autoencoder than `decoder`."""

    @property
    def estimate_memory(self) -> bool:
        """Whether all numbers for estimates of memory are known. If not, estimates are 0."""
        return None not in (self.kept_values, self.forward_values, self.decoder)

    def check(
        self, config: Model, transformer: Mapping[str, Any], factor: int, named: Callable[[str], str] = str
    ) -> None:
        """Raise `UserError` for configured sizes that a checkpoint does not support.

        Args:
            transformer: the transformer's ``config.json``.
            factor: VAE downscale factor.
            named: key → its name in messages, for example with the file that sets it.
        """
        cell, step = factor * self.patch, self.step(factor)
        sides = {side for shape in config.shapes for side in (shape.height, shape.width)}
        if wrong := sorted(side for side in sides if side % step):
            below = {side: side // step * step for side in wrong}
            near = (f"to {s} are {b} and {b + step}" if b else f"to {s} is {step}" for s, b in below.items())
            raise UserError(
                f"{named('model.resolution')} is {json.dumps(config.resolution)}, but {config.path} needs sides that "
                f"are a multiple of {step}; the nearest {', '.join(near)}."
            )
        self._check_frames(config, named)
        if self.schedules and config.schedule.kind not in self.schedules:
            raise UserError(
                f"{named('model.schedule.kind')} is {config.schedule.kind!r}, but the pipeline of model.family "
                f"{config.family!r} supports only {' or '.join(map(repr, self.schedules))}."
            )
        if self.fixed_text and config.max_sequence_length != self.longest:
            raise UserError(
                f"{named('model.max_sequence_length')} is {config.max_sequence_length}, but the transformer of "
                f"model.family {config.family!r} needs exactly {self.longest}."
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
        """Why the family does not support this `model.references`, as the end of a sentence; empty if it does."""
        least, most = self.references
        if least <= config.references <= most:
            return ""
        needed = f"needs {least}" if least == most else f"takes {least} to {most}"
        return f"model.family {config.family!r} {needed if most else 'takes no reference images; leave it out'}"

    def _check_frames(self, config: Model, named: Callable[[str], str]) -> None:
        stride, frames = self.frame_stride, config.frames
        if not stride and frames:
            raise UserError(
                f"{named('model.frames')} is {frames}, but model.family {config.family!r} generates images; "
                "leave it out."
            )
        if stride and not frames:
            raise UserError(
                f"model.frames is missing: model.family {config.family!r} generates videos of 1 + a multiple of "
                f"{stride} frames, such as {12 * stride + 1}."
            )
        if frames and (frames - 1) % stride:
            lower = (frames - 1) // stride * stride + 1
            nearest = f"{lower} or {lower + stride}" if lower > 1 else str(lower + stride)
            raise UserError(
                f"{named('model.frames')} is {frames}, but {config.path} generates 1 + a multiple of "
                f"{stride}, such as {nearest}."
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
        # Text tokens have positions from 1 on; the image has the next position after them.
        longest = (text - 2) // self.text_multiple * self.text_multiple
        if config.max_sequence_length > longest:
            raise UserError(
                f"{named('model.max_sequence_length')} is {config.max_sequence_length}, "
                f"but the positions of {config.path} end at {longest}."
            )

    def step(self, factor: int) -> int:
        """Sides of a sample must be multiples of this many pixels."""
        return math.lcm(factor * self.patch, self.multiple)

    def decoder_of(self, factor: int) -> DecoderSizes:
        """Sizes of the autoencoder with this downscale factor; zeros if they are not known."""
        known = self.other_decoders.get(factor, self.decoder)
        return known or DecoderSizes(parameters=0, bytes_a_pixel=0)

    def latent_frames(self, shape: SampleShape) -> int:
        """Number of latent frames per sample; 1 for images."""
        return 1 + (shape.frames - 1) // self.frame_stride if shape.frames else 1

    def frames(self, latent_frames: int) -> int:
        """Number of frames that a video of `latent_frames` is decoded to."""
        return 1 + (latent_frames - 1) * self.frame_stride

    def image_grid(self, shape: SampleShape, factor: int) -> tuple[int, int]:
        """Rows and columns of image tokens in one sample; for a video, in each latent frame."""
        step = factor * self.patch
        return shape.height // step, shape.width // step

    def image_tokens(self, shape: SampleShape, factor: int) -> int:
        """Number of image tokens of one sample, in all its frames."""
        return self.latent_frames(shape) * math.prod(self.image_grid(shape, factor))

    def text_tokens(self, config: Model) -> int:
        """Number of text tokens that the blocks transform in addition to the image tokens."""
        padded = math.ceil(config.max_sequence_length / self.text_multiple) * self.text_multiple
        return (padded + CLIP_TOKENS * self.clip) * self.text_in_blocks

    def tokens(self, config: Model, shape: SampleShape, factor: int) -> int:
        """Number of tokens that the blocks transform for one sample, including its references."""
        added = config.references if self.adds_references else 0
        return self.image_tokens(shape, factor) * (1 + added) + self.text_tokens(config)

    def latent_shape(self, shape: SampleShape, transformer: Mapping[str, Any], factor: int) -> tuple[int, ...]:
        """Shape of one sample's state as the transformer takes it, without batch dimension."""
        channels = self._channels(transformer)
        if self.packed:
            return self.image_tokens(shape, factor), channels
        frames = (self.latent_frames(shape),) if self.frame_stride else ()
        return channels, *frames, shape.height // factor, shape.width // factor

    def _channels(self, transformer: Mapping[str, Any]) -> int:
        """Number of channels of a sample's latents, as the transformer takes them."""
        channels = int(transformer["in_channels"])
        return (channels - self.marks) // 2 if self.marks else channels

    def embedding_bytes(self, config: Model, transformer: Mapping[str, Any], factor: int) -> int:
        """Size of the embedding of a text and its references, on disk and in memory, bytes."""
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
        """Estimates of the activations that a transformer of `blocks` blocks keeps for the backward pass of the largest
        sample, bytes: if blocks recompute everything (block inputs, plus the activations of one block), and if they
        recompute nothing.
        """
        inputs = blocks * self._stream_bytes(config, transformer, factor)
        if self.kept_values is None:
            return 0, 0
        most = round(self.kept_values[0 if compiled else 1] * inputs)
        return inputs + most // max(1, blocks), most

    def sampling_bytes(self, config: Model, transformer: Mapping[str, Any], factor: int) -> tuple[int, int]:
        """Estimates of peak memory without gradients, bytes: in a forward of the largest sample, and in the decoding of
        the largest image.
        """
        forward = round((self.forward_values or 0.0) * self._stream_bytes(config, transformer, factor))
        decoding = self.decoder_of(factor).bytes_a_pixel * config.shapes.largest.pixels
        return forward, decoding * DTYPE_BYTES[config.dtype] // 2

    def _stream_bytes(self, config: Model, transformer: Mapping[str, Any], factor: int) -> int:
        """Size of the largest sample's tokens between blocks, bytes."""
        width = math.prod(int(transformer[key]) for key in self.width)
        return self.tokens(config, config.shapes.largest, factor) * width * DTYPE_BYTES[config.dtype]
