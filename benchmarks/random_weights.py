"""Random weights for modules on the meta device, and their files, with shards and index as published. Writing is
limited only by the disk.

All values come from one repeated block of normal numbers. A tensor's name determines its offset in the block, and the
block's length is a prime, so no two rows of a matrix are equal. The block is generated on the CPU, so files are equal
on every machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

STD = 0.02
"""Standard deviation of random weights. Norms are 1 and biases 0, so that a deep network's output stays of order 1."""
NARROW, NARROW_STD = 256, 0.15
"""A layer with fewer than NARROW inputs has the standard deviation NARROW_STD: with STD the signal in a tiny network
would vanish.
"""
BLOCK = 16_777_213
"""Length of the block, a prime."""
SHARD = {"diffusion_pytorch_model": "10GB", "model": "5GB"}
"""Name of a weights file → size of one shard, as published by diffusers and transformers."""
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
WRITERS = 16
"""Files written in parallel."""


def constant(name: str, tensor: Tensor) -> float | None:
    """The constant value of a weight (norms, biases); None if its values are random."""
    if not tensor.is_floating_point() or tensor.dim() == 0:
        return 0.0
    if tensor.dim() > 1:
        return None
    return 0.0 if name.endswith("bias") else 1.0


@torch.no_grad()
def random_model(make: Callable[[], nn.Module], device: str) -> Any:
    """A module with random bfloat16 parameters, allocated only on `device`: seconds for 12 billion weights. Buffers,
    such as tables of positions, keep the module's values.
    """
    with init_empty_weights(include_buffers=False):
        module = make()
    nn.Module.to(module, torch.bfloat16)  # its own .to would warn about layers that it keeps in float32
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(module.named_parameters()):
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        value = constant(name, tensor)
        _ = tensor.normal_(0.0, STD, generator=generator) if value is None else tensor.fill_(value)
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, nn.Parameter(tensor))
    module.to(device)
    return module.eval()


def write(networks: Mapping[Path, nn.Module]) -> int:
    """Write networks on the meta device to folders, with their ``config.json``; returns the bytes of all weights."""
    shards: dict[Path, dict[str, Tensor]] = {}
    for folder, network in networks.items():
        folder.mkdir(parents=True, exist_ok=True)
        shards |= shards_of(folder, network)
    with ThreadPoolExecutor(min(WRITERS, os.cpu_count() or 1)) as pool:
        largest_first = sorted(shards.items(), key=lambda item: -_size(item[1]))
        return sum(pool.map(lambda item: write_file(*item), largest_first))


def shards_of(folder: Path, network: Any) -> dict[Path, dict[str, Tensor]]:
    """File → its tensors. Writes the configuration and, for several files, the index."""
    weights = dict[str, Tensor]()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if not any(tensor is other for other in weights.values()):  # tied weights are stored once
            weights[name] = tensor
    stem = "diffusion_pytorch_model" if hasattr(network, "save_config") else "model"
    if stem == "model":
        network.config.architectures = [type(network).__name__]
        network.config.dtype = next(network.parameters()).dtype
        network.config.save_pretrained(folder)
    else:
        network.save_config(folder)
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=SHARD[stem]
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    files = split.filename_to_tensors.items()
    return {folder / file: {name: weights[name] for name in names} for file, names in files}


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write one safetensors file; returns the bytes of its weights."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            _write_values(file, name, tensor)
    return end


def _write_values(file: Any, name: str, tensor: Tensor) -> None:
    value = constant(name, tensor)
    if value is not None:
        _put(file, _bytes(torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu").reshape(-1)))
        return
    std = NARROW_STD if tensor[0].numel() < NARROW else STD
    block, size = _block(tensor.dtype, std), tensor.element_size()
    left, at = tensor.numel() * size, crc32(name.encode()) % BLOCK * size
    while left:
        piece = block[at : at + left]
        _put(file, piece)
        left, at = left - len(piece), 0


def _put(file: Any, content: memoryview) -> None:
    """Write all of `content`: an unbuffered write may write only part of it."""
    while content:
        content = content[file.write(content) :]


@cache
def _block(dtype: torch.dtype, std: float) -> memoryview:
    generator = torch.Generator("cpu").manual_seed(0)
    return _bytes(torch.randn(BLOCK, generator=generator, device="cpu").mul_(std).to(dtype))


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy().data) if values.numel() else memoryview(b"")


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
