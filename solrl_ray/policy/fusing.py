"""A diffusers checkpoint with a policy merged into its transformer: a folder that ``from_pretrained`` loads alone.

    base ──► .FOLDER.partial: other parts copied, the transformer's files written anew, one by one ──► FOLDER

Only the weights that LoRA touches change, and each keeps its dtype.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from solrl_ray.common import safetensors_file
from solrl_ray.common.files import free_bytes, make_folder, read_json, remove, sync_folder, write_synced
from solrl_ray.config.schema import Lora
from solrl_ray.errors import RunError, UserError
from solrl_ray.policy.merge import merged_weight

PART = "transformer"
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
OTHER_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".gguf", ".msgpack", ".onnx")
"""Ends of files beside the parts, which hold the whole model once more."""


def fuse(base: Path, folder: Path, factors: Mapping[str, Tensor], lora: Lora) -> int:
    """Write the checkpoint `base` to the new `folder` with the weights W + alpha / rank · B A, and return its bytes.

    Sums are of float64 and rounded once (`merge.merged_weight`): weights of bfloat16 get the bits of a
    regenerator with this policy. Those of float16 are rounded a second time.

    Args:
        base: a local diffusers checkpoint.
        factors: of `policy.adapters`, by name.

    Raises:
        UserError: the folder is there, or the transformer's files are not safetensors that have every weight.
        RunError: the disk has no room.
    """
    if folder.exists():
        raise UserError(f"{folder} is there already; name another folder with --out, or remove it.")
    sources = _weight_files(base / PART)
    linears = {name.rpartition(".")[0] for name in factors}
    _check(sources, linears, factors)
    copied = dict(_other_files(base))
    size = sum(file.stat().st_size for file in (*copied.values(), *sources))
    make_folder(folder.parent)
    if free_bytes(folder.parent) < size:
        raise RunError(
            f"{folder} needs {size / 1e9:.1f} GB, but its disk has {free_bytes(folder.parent) / 1e9:.1f} GB free"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    remove(partial)
    try:
        for name, file in copied.items():
            make_folder((partial / name).parent)
            shutil.copyfile(file, partial / name)
        for file in sources:
            write_synced(partial / PART / file.name, _merged(file, linears, factors, lora))
        partial.rename(folder)
    finally:
        remove(partial)
    sync_folder(folder.parent)
    return size


def _other_files(base: Path) -> Iterator[tuple[Path, Path]]:
    """What is copied, by its path in the checkpoint: all of the other parts, and of the rest what is no weight."""
    index: dict[str, Any] = read_json(base / "model_index.json")
    named = {name for name, entry in index.items() if isinstance(entry, list)} - {PART}
    parts = {name for name in named if name == Path(name).name != ".."}  # nothing outside the checkpoint
    for folder, whole in ((base, False), (base / PART, False), *((base / part, True) for part in sorted(parts))):
        for file in sorted(folder.rglob("*") if whole else folder.iterdir()):
            if file.is_file() and (whole or not file.name.endswith(OTHER_WEIGHTS)):
                yield file.relative_to(base), file


def _weight_files(part: Path) -> list[Path]:
    """The files that ``from_pretrained`` reads the part's weights from."""
    index = part / INDEX
    names = {WEIGHTS}
    if index.is_file():
        content = read_json(index)
        found = content.get("weight_map") if isinstance(content, dict) else None
        names = {str(name) for name in found.values()} if isinstance(found, dict) else set()
    files = [part / name for name in sorted(names) if name == Path(name).name]
    if not files or len(files) < len(names) or not all(file.is_file() for file in files):
        raise UserError(f"{part} has no {WEIGHTS}, or not all files that {INDEX} names; only such weights are merged.")
    return files


def _check(files: list[Path], linears: set[str], factors: Mapping[str, Tensor]) -> None:
    """Refuse a transformer that lacks a weight that LoRA touches, or has it in another shape. Reads headers alone."""
    shapes = dict[str, list[int]]()
    for file in files:
        try:
            with safetensors.safe_open(file, framework="pt") as content:
                shapes |= {key: content.get_slice(key).get_shape() for key in content.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {error}") from error
    for linear in sorted(linears):
        wanted = [len(factors[f"{linear}.lora_B"]), factors[f"{linear}.lora_A"].shape[1]]
        found = shapes.get(f"{linear}.weight")
        if found not in (wanted, [*wanted, 1, 1]):
            raise UserError(
                f"{files[0].parent} has {linear}.weight {found or 'not at all'}, but the policy is for {wanted}; "
                "it goes with another checkpoint."
            )


def _merged(file: Path, linears: set[str], factors: Mapping[str, Tensor], lora: Lora) -> list[bytes | memoryview]:
    """A file of weights with the policy in them. Others stay mapped from the disk until they are written."""
    with safetensors.safe_open(file, framework="pt") as content:
        tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118
        metadata = content.metadata() or {}
    for key in tensors.keys() & {f"{linear}.weight" for linear in linears}:
        linear, weight = key.removesuffix(".weight"), tensors[key]
        base = weight.flatten(1)  # of a 1×1 convolution, too
        wide = base.float() if base.dtype == torch.float16 else base
        merged = merged_weight(wide, factors[f"{linear}.lora_A"], factors[f"{linear}.lora_B"], lora.scaling)
        tensors[key] = merged.to(weight.dtype).view(weight.shape)
    return safetensors_file.pieces(tensors, metadata)
