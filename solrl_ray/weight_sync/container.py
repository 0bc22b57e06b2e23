"""Tensors in one buffer: a safetensors file in memory, read without copying and refused if it is truncated.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from typing import Annotated, cast

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from solrl_ray.common.safetensors_file import DTYPES, pieces
from solrl_ray.errors import RunError

Buffer = bytes | memoryview | np.ndarray


class Unusable(RunError):
    """A payload that this reader cannot take, though it may be sent another one of the same revision: damaged, or
    without the factors that it does not hold.
    """


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"no type of tensors is called {dtype!r}")
    return dtype


class _Entry(TypedDict):
    """A tensor's entry in a header."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    dtype: Annotated[str, AfterValidator(_known)]
    shape: list[Annotated[int, Field(ge=0)]]
    data_offsets: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]


_ENTRIES: TypeAdapter[dict[str, _Entry]] = TypeAdapter(dict[str, _Entry])
_METADATA: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str], config=ConfigDict(strict=True))


def write(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of CPU tensors."""
    return b"".join(pieces(tensors, metadata))


def read(buffer: Buffer, what: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file; the tensors are views of `buffer` and must not be written to.

    Args:
        what: the subject of error messages, such as ``the revision's payload``.

    Raises:
        Unusable: the file is truncated, longer than its header says, or has no readable header.
    """
    view = memoryview(cast(bytes, buffer)).cast("B")
    start, header, metadata = _header(view, what)
    ends = {name: entry["data_offsets"][1] for name, entry in header.items()}
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if start + end > len(view):
            raise Unusable(f"{what} of {len(view)} bytes is cut off inside tensor {name!r}")
    if len(view) != start + max(ends.values(), default=0):
        raise Unusable(f"{what} of {len(view)} bytes is longer than its header says")
    try:
        return metadata, {name: _tensor(view[start:], entry) for name, entry in header.items()}
    except (RuntimeError, TypeError, ValueError) as error:  # an impossible shape
        raise Unusable(f"the header of {what} states a shape that cannot be: {error}") from error


def _header(view: memoryview, what: str) -> tuple[int, dict[str, _Entry], dict[str, str]]:
    """The position of the data, the entries of the tensors, and the metadata."""
    start = 8 + int.from_bytes(view[:8], "little")
    if len(view) < max(start, 8):
        raise Unusable(f"{what} of {len(view)} bytes is cut off inside its header")
    try:
        parsed = json.loads(bytes(view[8:start]))
        metadata = _METADATA.validate_python(parsed.pop("__metadata__", {}))
        header = _ENTRIES.validate_python(parsed)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"the header of {what} is unreadable: {' '.join(str(error).split())[:200]}") from error
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, size = entry["data_offsets"][0], math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        if begin != end or entry["data_offsets"][1] != begin + size:
            raise Unusable(f"tensor {name!r} of {what} does not have the size or the place that its header states")
        end = begin + size
    return start, header, metadata


def _tensor(data: memoryview, entry: _Entry) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    flat = view(data[begin:end])
    try:
        return flat.view(dtype).reshape(shape)
    except RuntimeError:
        # Data that is not aligned to its type needs a copy.
        return flat.clone().view(dtype).reshape(shape)


def view(content: Buffer) -> torch.Tensor:
    """A buffer as uint8 [n], without a copy; it must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(content, dtype=torch.uint8)
