"""Reads and writes safetensors files with metadata.

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
"""Name of a data type in the file format → PyTorch's data type."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read(content: bytes) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file's bytes. Raises ValueError if the file is truncated or of another format."""
    try:
        tensors = safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a data type that PyTorch lacks
        raise ValueError(f"it is no whole safetensors file: {error}") from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header.get("__metadata__", {}), tensors


def written(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file, with metadata sorted by name: the order of the safetensors package differs each time."""
    content = safetensors.torch.save(dict(tensors))
    size = int.from_bytes(content[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(content[8 : 8 + size])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]
