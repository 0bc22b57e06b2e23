"""The sizes of a family, without PyTorch: tokens, latents, and the activations of a backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from solrl_ray.config.problems import show
from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError
from solrl_ray.models.shapes import DTYPE_BYTES, TEXT_WIDTHS
from solrl_ray.records import SampleShape

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
DC_AE = DecoderSizes(parameters=312_250_275, bytes_a_pixel=1666)
QWEN = DecoderSizes(parameters=126_892_531, bytes_a_pixel=3462)
# Videos: of a pixel of the frame, while one latent frame is decoded.
WAN_VAE = DecoderSizes(parameters=126_892_531, bytes_a_pixel=10_176)
WAN22_VAE = DecoderSizes(parameters=704_688_668, bytes_a_pixel=10_818)


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
    schedule: str = ""
    """The only `model.schedule.kind` that the stock pipeline can be told; empty: all."""
    frame_stride: int = 0
    """Frames that each latent frame after the first makes; 0: the family makes pictures."""
    multiple: int = 1
    """Pixels of which the stock pipeline takes multiples, if those of the latent grid are not enough."""
    kept_values: tuple[float, float]
    """Values that a block's forward keeps for its backward pass, per channel of an image or text token: of compiled
    blocks, of eager ones. Measured; for estimates of memory.
    """
    forward_values: float
    """Peak of values in a forward without gradient, per channel of such a token: of eager blocks, as counted by
    `benchmarks/activation_sizes.py`. Compiled ones hold less.
    """
    decoder: DecoderSizes
    """Of the autoencoder, for estimates of memory."""
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
                f"{named('model.resolution')} is {show(config.resolution)}, but {config.path} needs a multiple of "
                f"{step} for each side; the nearest {', '.join(near)}."
            )
        self._check_frames(config, named)
        if self.schedule not in ("", config.schedule.kind):
            raise UserError(
                f"{named('model.schedule.kind')} is {config.schedule.kind!r}, but the pipeline of model.family "
                f"{config.family!r} has the noise levels of {self.schedule!r}."
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
                f"{named('model.resolution')} is {show(config.resolution)}, but the positions of {config.path} end at "
                f"{SampleShape(height, width)}."
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
        return self.other_decoders.get(factor, self.decoder)

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
        most = round(self.kept_values[0 if compiled else 1] * inputs)
        return inputs + most // max(1, blocks), most

    def sampling_bytes(self, config: Model, transformer: Mapping[str, Any], factor: int) -> tuple[int, int]:
        """Estimates of a worker's peak without gradients: bytes of the largest sample's forward, of
        the largest image's decoding.
        """
        forward = round(self.forward_values * self._stream_bytes(config, transformer, factor))
        decoding = self.decoder_of(factor).bytes_a_pixel * config.shapes.largest.pixels
        return forward, decoding * DTYPE_BYTES[config.dtype] // 2

    def _stream_bytes(self, config: Model, transformer: Mapping[str, Any], factor: int) -> int:
        """The largest sample's tokens between blocks."""
        width = math.prod(int(transformer[key]) for key in self.width)
        return self.tokens(config, config.shapes.largest, factor) * width * DTYPE_BYTES[config.dtype]


FLUX = FamilySizes(patch=2, longest=512, packed=True, kept_values=(13.0, 16.4), forward_values=17.3, decoder=KL)
FLUX_KONTEXT = replace(FLUX, references=(1, 1))
FLUX2_KLEIN = replace(FLUX, forward_values=22.4, references=(0, 4))  # activations kept as for FLUX.1: not measured
QWEN_IMAGE = FamilySizes(  # activations estimated: what narrow eager blocks save on a CPU, in proportion to SD3.5's
    patch=2, longest=1024, packed=True, kept_values=(17.0, 26.5), forward_values=14.4, decoder=QWEN
)
QWEN_IMAGE_EDIT = replace(QWEN_IMAGE, references=(1, 3))
SANA = FamilySizes(  # kept: measured, and what float32 attention adds, counted on a CPU (1.0, 4.4)
    patch=1,
    longest=300,
    packed=False,
    text_in_blocks=False,
    kept_values=(30.6, 41.9),
    forward_values=15.6,
    decoder=DC_AE,
)
SD3 = FamilySizes(
    patch=2,
    longest=512,
    packed=False,
    clip=True,
    positions="pos_embed_max_size",
    kept_values=(14.4, 22.5),
    forward_values=12.7,
    decoder=KL,
)
WAN = FamilySizes(  # activations estimated as for Qwen-Image; those of the 1.3B, which has the widest feed-forward
    patch=2,
    longest=512,
    packed=False,
    text_in_blocks=False,
    schedule="shift",
    frame_stride=4,
    kept_values=(21.7, 33.9),
    forward_values=16.0,
    decoder=WAN_VAE,
    other_decoders={16: WAN22_VAE},
)
# Estimated: each token has a modulation of its own, six values a channel more, in an eager block twelve.
WAN_I2V = replace(WAN, references=(1, 1), adds_references=False, kept_values=(27.7, 45.9), forward_values=28.0)
WAN21_I2V = replace(WAN, references=(1, 1), adds_references=False, marks=4, fixed_text=True)
# Activations kept as for SANA: not measured.
SANA_VIDEO = replace(SANA, patch=2, frame_stride=4, multiple=32, forward_values=17.1, decoder=WAN_VAE)
Z_IMAGE = FamilySizes(  # activations estimated as for Qwen-Image
    patch=2,
    longest=512,  # the stock call's default; it names no limit
    packed=False,
    text_multiple=32,
    width=("dim",),
    positions="axes_lens",
    kept_values=(20.0, 31.0),
    forward_values=15.9,
    decoder=KL,
)
