"""Tensors in one buffer: a safetensors file in memory, read without copying and refused if it is truncated.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from solrl_ray.common.safetensors_file import DTYPES, pieces
from solrl_ray.errors import RunError

Buffer = bytes | memoryview | np.ndarray


class Unusable(RunError):
    """A payload that this reader cannot take, though it may be sent another one of the same revision: damaged, or
    without the factors that it does not hold.
    """


def write(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of CPU tensors."""
    return b"".join(pieces(tensors, metadata))


def read(buffer: Buffer, what: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file; the tensors are views of `buffer` and must not be written to.

    `what`: the subject of error messages, such as ``the revision's payload``. Raises Unusable: the file is truncated,
    longer than its header says, or has no readable header.
    """
    view = memoryview(cast(bytes, buffer)).cast("B")
    start = 8 + int.from_bytes(view[:8], "little")
    if len(view) < max(start, 8):
        raise Unusable(f"{what} of {len(view)} bytes is cut off inside its header")
    try:
        header = json.loads(bytes(view[8:start]))
        metadata = dict(header.pop("__metadata__", {}))
        return metadata, _tensors(header, view[start:], what)
    # Whatever a header holds that is no header; a shape that cannot be.
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, OverflowError, RecursionError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise Unusable(f"the header of {what} is unreadable: {said[:200]}") from error


def _tensors(header: dict[str, Any], data: memoryview, what: str) -> dict[str, torch.Tensor]:
    """The tensors of a header's entries, which must follow each other without gaps."""
    found: dict[str, torch.Tensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        if any(type(side) is not int for side in shape):
            raise ValueError(f"{name} has shape {shape}")
        begin, size = end, math.prod(shape) * dtype.itemsize
        end += size
        if entry["data_offsets"] != [begin, end]:
            raise Unusable(f"tensor {name!r} of {what} does not have the size or the place that its header states")
        if end > len(data):
            raise Unusable(f"{what} is cut off inside tensor {name!r}")
        found[name] = _tensor(data[begin:end], dtype, shape)
    if end != len(data):
        raise Unusable(f"{what} is {len(data) - end} bytes longer than its header says")
    return found


def _tensor(content: memoryview, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(content, dtype=torch.uint8)
    try:
        return flat.view(dtype).reshape(shape)
    except RuntimeError:
        # Data that is not aligned to its type needs a copy.
        return flat.clone().view(dtype).reshape(shape)
