"""Deltas of packed weights: the exclusive or of a tensor's bytes with its parent's, compressed with zstd.

Under a frozen global scale an update changes few codes, so that most bytes of the exclusive or are zero.
"""

from __future__ import annotations

import numpy as np
import torch
import zstandard

from solrl_ray.weight_sync.checksums import DTYPES, Stamp, raw_bytes, stamp
from solrl_ray.weight_sync.container import Unusable

LEVEL = 1
"""zstd's fastest usual level: runs of zeros need no search, and higher ones save little."""


def encode(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """One zstd frame as uint8 [n], or None if the tensor itself is not larger, or is of another shape or type."""
    if new.shape != old.shape or new.dtype != old.dtype:
        return None
    content = raw_bytes(new) ^ raw_bytes(old)
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(content)
    if len(frame) >= content.nbytes:
        return None
    return torch.from_numpy(np.frombuffer(frame, np.uint8).copy())


def decode(frame: torch.Tensor, old: torch.Tensor, name: str, stated: Stamp) -> torch.Tensor:
    """The new tensor, on the CPU.

    Raises:
        Unusable: the frame is damaged, or `old` is not the tensor that it was made against: what results does not
        have the stamp that is `stated`.
    """
    parent = raw_bytes(old)
    compressed = raw_bytes(frame).data
    try:
        size = zstandard.frame_content_size(compressed)
        if size != parent.nbytes:  # before anything of that size is allocated
            raise Unusable(f"the delta of tensor {name!r} is of {size} bytes, the tensor of {parent.nbytes}")
        content = zstandard.ZstdDecompressor().decompress(compressed)
    except zstandard.ZstdError as error:
        raise Unusable(f"the delta of tensor {name!r} is damaged: {error}") from error
    mixed = torch.from_numpy(np.frombuffer(content, np.uint8) ^ parent)
    new = mixed.view(DTYPES[stated.dtype]).reshape(old.shape)
    if stamp(new) != stated:
        raise Unusable(f"the delta of tensor {name!r} does not lead to the checksum that the manifest states")
    return new
