"""Reads safetensors files with their metadata, and writes them without copying the tensors.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import safetensors.torch
import torch

DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Data types by their names in such files; a file's tensors are sorted in this order."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLACES = {dtype: place for place, dtype in enumerate(DTYPES.values())}


def pieces(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """A safetensors file of CPU tensors as consecutive pieces: its header, then views of the tensors.

    The bytes are those of the package `safetensors`, whose functions make two copies of the file and block the process.
    """
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    order = sorted(contiguous, key=lambda name: (_PLACES[contiguous[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        tensor = contiguous[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    content = [contiguous[name].reshape(-1).view(torch.uint8).numpy().data for name in order]
    return [len(text).to_bytes(8, "little"), text, *content]


def read(content: bytes) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file's bytes. Raises ValueError: they are cut off, or no such file."""
    try:
        tensors = safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a data type that PyTorch lacks
        raise ValueError(f"it is no whole safetensors file: {error}") from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header.get("__metadata__", {}), tensors
