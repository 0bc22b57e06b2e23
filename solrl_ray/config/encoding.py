"""What encoding prompts takes, for plans: seconds, number of encoders, memory of a device, and disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from solrl_ray.config.pools import encoder_of, encoders, encoding_batch
from solrl_ray.config.schema import Config

GPU_FLOPS, THREAD_FLOPS = 300e12, 16e9
"""Assumed of a large GPU in bfloat16, a third of an H100's peak, and of a CPU thread: T5-XXL at 128 tokens in 77 s, the
better of two measurements on an EPYC.
"""
LOAD_BYTES = 2.5e9
"""Assumed bytes a second from the page cache to a device."""


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


def encoding_costs(config: Config, weight_bytes: int, flops: int, prompt_bytes: int) -> EncodingCosts:
    """
    Args:
        weight_bytes: of the text encoders.
        flops: floating-point operations of encoding a prompt.
        prompt_bytes: of an embedding.
    """
    worker, batch = encoder_of(config.fleet), encoding_batch(config.fleet)
    rows = batch + (batch > 1)  # see `DiffusionModel.encode`
    return EncodingCosts(
        load_seconds=weight_bytes / LOAD_BYTES,
        batch_seconds=rows * flops / (GPU_FLOPS if worker.num_gpus else THREAD_FLOPS * worker.threads),
        batch=batch,
        encoders=encoders(config),
        weight_bytes=weight_bytes,
        prompt_bytes=prompt_bytes,
    )
