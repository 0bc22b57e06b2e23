"""Advice if much of what regenerators compute is padding: the kept seeds do not fill their micro-batches."""

from __future__ import annotations

import math

from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage

MUCH = 0.25
"""Share of the regenerated images from which it is worth a sentence."""


def advice(config: Config) -> str:
    """The sentence for a plan, with a size that takes as many forwards, of fewer images; empty if little is padded."""
    keep, size = config.rollout.keep, config.rollout.regenerate.micro_batch
    forwards = math.ceil(keep / size)
    if is_one_stage(config) or 1 - keep / (forwards * size) < MUCH:
        return ""
    return (
        f"for each prompt {forwards * size} images are regenerated, and {forwards * size - keep} of them are padding, "
        f"because rollout.keep is {keep} and rollout.regenerate.micro_batch {size}; "
        f"rollout.regenerate.micro_batch={math.ceil(keep / forwards)} saves that time"
    )
