"""Finds a reward's checkpoint in a local folder or the Hugging Face cache. It never downloads."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from solrl_ray.config.problems import listed
from solrl_ray.errors import MissingCheckpoint, UserError
from solrl_ray.models import paths

CONFIG = ("config.json",)
TRANSFORMERS_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
CLIP_TOKENIZER = ("tokenizer.json", "vocab.json")
BERT_TOKENIZER = ("tokenizer.json", "vocab.txt")
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def folder(path: str, files: Sequence[tuple[str, ...]], key: str, *, source: str = "", whole: bool = False) -> Path:
    """The folder of a checkpoint: `path` itself, or its snapshot in the Hugging Face cache.

    Users download checkpoints beforehand: they have gigabytes, and a worker's start has a deadline.

    Args:
        path: local folder or Hugging Face id.
        files: required files; each entry lists alternatives, of which one is enough.
        key: the configuration key in messages.
        source: address of a file that is not on the hub.
        whole: the weights are in several files, so the message asks for the whole repository.

    Raises:
        UserError: the local folder does not exist, or lacks files.
        MissingCheckpoint: files are not in the cache; the message has the download command.
    """
    resolved = paths.checkpoint(path, key)
    present = [next((file for name in names if (file := find(resolved, name))), None) for names in files]
    missing = [names[0] for names, file in zip(files, present, strict=True) if file is None]
    if not missing:
        assert present[0] is not None
        return present[0].parent
    listed = " ".join(missing)
    if isinstance(resolved, Path):
        advice = f"get it from {source}" if source else "copy it there"
        raise UserError(f"{key} is {path!r}, but {listed} cannot be read from that folder: no such file; {advice}.")
    raise MissingCheckpoint(
        f"{key} is {path!r}, which is not a local folder, and {listed} cannot be read from the Hugging Face cache; "
        f"run `hf download {path}{'' if whole else f' {listed}'}` on every machine that scores."
    )


def check_type(folder: Path, types: Sequence[str], path: str, key: str, kind: str, right: str) -> str:
    """The ``model_type`` of the checkpoint in a folder, configured as `path`.

    Raises UserError naming `key` if it is not one of `types`, which the reward supports; `right` is a valid example.
    """
    model_type = paths.read_json(folder, "config.json", key).get("model_type")
    if model_type not in types:
        raise UserError(
            f"{key} is {path!r}, a checkpoint of type {model_type!r}, but {kind} takes {listed(types)}, such as "
            f"{right}."
        )
    return str(model_type)


def read_torch(folder: Path, name: str, key: str) -> dict[str, Any]:
    """Read a dict written by `torch.save`, memory-mapped; only tensors and plain containers are unpickled.

    Raises UserError naming `key` if the file is not such a dict.
    """
    try:
        content = torch.load(folder / name, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(paths.unreadable(folder, name, key, error)) from error
    if not isinstance(content, dict):
        raise UserError(f"{key} is {str(folder)!r}, but its file {name} holds a {type(content).__name__}, not a dict.")
    return content


def under(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The weights whose names begin with `prefix`, with the prefix removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def fill(module: torch.nn.Module, weights: dict[str, Any], folder: Path, name: str, key: str) -> None:
    """Load all of `weights` into `module`; names and shapes must match exactly.

    Raises UserError naming `key` if they do not.
    """
    try:
        module.load_state_dict(weights)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise UserError(paths.unreadable(folder, name, key, error)[:600]) from error


def find(resolved: Path | str, name: str) -> Path | None:
    """One file of a checkpoint (a folder, or an id in the Hugging Face cache); None if it is missing."""
    if isinstance(resolved, Path):
        return resolved / name if (resolved / name).is_file() else None
    cached = try_to_load_from_cache(resolved, name)
    return Path(cached) if isinstance(cached, str) else None
