"""What encoding prompts takes, for plans: seconds, memory of a device, and disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from solrl_ray.config.arithmetic import DTYPE_BYTES
from solrl_ray.config.pools import encoder_of, encoders, encoding_batch
from solrl_ray.config.schema import Config, Model
from solrl_ray.models.sizes import CLIP_TOKENS, FAMILY_SIZES

GPU_FLOPS, THREAD_FLOPS = 300e12, 16e9
"""Assumed of a large GPU in bfloat16, a third of an H100's peak, and of a CPU thread: T5-XXL at 128 tokens in 77 s, the
better of two measurements on an EPYC.
"""
LOAD_BYTES = 2.5e9
"""Assumed bytes a second from the page cache to a device."""
_WIDTHS = ("caption_channels", "cap_feat_dim", "joint_attention_dim")
"""Keys of the transformer's ``config.json`` for the width of a text's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingCosts:
    load_seconds: float
    """Until text encoders that left a device are back, without reading the disk."""
    batch_seconds: float
    """Of a micro-batch, on one encoder."""
    batch: int
    """Its prompts."""
    encoders: int
    """Which work at the same time."""
    weight_bytes: int
    """Of the text encoders, on each encoder's device."""
    prompt_bytes: int
    """Of an embedding, on disk and in memory."""

    def seconds(self, prompts: int) -> float:
        """Of a visit of the text encoders, with this many prompts without an embedding."""
        rounds = math.ceil(math.ceil(prompts / self.batch) / self.encoders)
        return self.load_seconds + rounds * self.batch_seconds if prompts else 0.0


def encoding_costs(
    config: Config, text_encoders: Mapping[str, nn.Module], transformer: Mapping[str, Any]
) -> EncodingCosts:
    """
    Args:
        text_encoders: what `DiffusionModel.text_skeletons` returns.
        transformer: its ``config.json``.
    """
    model, worker = config.model, encoder_of(config.fleet)
    batch, *others, long = encoding_batch(config.fleet), *text_encoders.values()
    tokens = [CLIP_TOKENS] * len(others) + [model.max_sequence_length]
    work = sum(2 * _multiplied(each) * count for each, count in zip((*others, long), tokens, strict=True))
    weight_bytes = sum(_parameters(each) for each in (*others, long)) * DTYPE_BYTES[model.dtype]
    rows = batch + (batch > 1)  # see `DiffusionModel.encode`
    return EncodingCosts(
        load_seconds=weight_bytes / LOAD_BYTES,
        batch_seconds=rows * work / (GPU_FLOPS if worker.num_gpus else THREAD_FLOPS * worker.threads),
        batch=batch,
        encoders=encoders(config),
        weight_bytes=weight_bytes,
        prompt_bytes=_prompt_bytes(model, transformer),
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _multiplied(module: nn.Module) -> int:
    """Parameters that each token is multiplied with: not those of tables."""
    tables = nn.ModuleList([each for each in module.modules() if isinstance(each, nn.Embedding)])
    return _parameters(module) - _parameters(tables)


def _prompt_bytes(model: Model, transformer: Mapping[str, Any]) -> int:
    sizes = FAMILY_SIZES[model.family]
    tokens = sizes.text_tokens(model) or model.max_sequence_length
    width = next(int(transformer[key]) for key in _WIDTHS if transformer.get(key))
    pooled = int(transformer.get("pooled_projection_dim") or 0)
    return (tokens * width + pooled) * DTYPE_BYTES[model.dtype]
