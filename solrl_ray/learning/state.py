"""The learner's state, independent of world size, and its folder on disk.

Files of a state folder:

- ``policy.safetensors``: factors ``default/…``, ``old/…``, ``ema/…`` and maybe ``anchor/…``.
- ``optimizer.safetensors``: ``exp_avg/…`` and ``exp_avg_sq/…``.
- ``state.json``: counters, size and SHA-256 of both files, and the SHA-256 of these entries.

The folder gets its final name only when it is complete and on the disk.
"""

from __future__ import annotations

import hashlib
import json
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch

from solrl_ray.common.files import MOST_BYTES, read_regular, replace_folder
from solrl_ray.common.finite import first_not_finite
from solrl_ray.common.tensor_serialization import Portable
from solrl_ray.errors import RunError, UserError

FORMAT = "solrl-learner-state/2"

Tensors = dict[str, torch.Tensor]
_FILES = {"policy.safetensors": ("default", "old", "ema", "anchor"), "optimizer.safetensors": ("exp_avg", "exp_avg_sq")}

_PARTS = [part for parts in _FILES.values() for part in parts]


@dataclass(frozen=True, slots=True)
class PolicyFactors(Portable, read_only=True):
    """One policy of a learner: LoRA factors by name, float32 on the CPU. Do not change them."""

    factors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState(Portable, read_only=True):
    """All state that the next update depends on. Tensors are float32 on the CPU, by LoRA factor. Do not change them."""

    updates: int
    """Number of finished iterations, which is also the revision of `old`."""
    steps: int
    """Number of optimiser steps: the step count of AdamW, of the EMA and of the decays."""
    default: Tensors
    old: Tensors
    ema: Tensors
    exp_avg: Tensors
    exp_avg_sq: Tensors
    anchor: Tensors = field(default_factory=dict)
    """Empty if the objective has no anchor."""
    rollbacks: int = 0
    """Number of times the run has gone back to a checkpoint; each lowers the learning rate (`schedules`)."""

    @classmethod
    def first(cls, factors: Tensors) -> LearnerState:
        """The state before the first update, with these factors for all policies."""

        def copy() -> Tensors:  # copies, because a safetensors file may not hold a tensor twice
            return {name: factor.clone() for name, factor in factors.items()}

        mean, square = zeros_like(factors), zeros_like(factors)
        return cls(updates=0, steps=0, default=copy(), old=copy(), ema=copy(), exp_avg=mean, exp_avg_sq=square)

    def save(self, folder: Path) -> None:
        """Write the state; `folder` appears once all of it is on the disk.

        An existing folder is replaced: a resumed run repeats an update, so it holds the same state or a damaged one.

        Raises RunError if a tensor has NaN or Inf. Then nothing is written, so the previous state can be resumed.
        """
        self.check_finite()
        contents: dict[str, bytes] = {}
        for name, parts in _FILES.items():
            tensors = {f"{part}/{key}": tensor for part in parts for key, tensor in getattr(self, part).items()}
            # Saved as NumPy arrays: safetensors refuses PyTorch tensors that share memory.
            contents[name] = safetensors.numpy.save(
                {key: tensor.detach().contiguous().numpy() for key, tensor in tensors.items()}
            )
        files = {name: {"bytes": len(content), "sha256": _sha256(content)} for name, content in contents.items()}
        manifest = {"format": FORMAT, "updates": self.updates, "steps": self.steps, "files": files}
        manifest |= {"rollbacks": self.rollbacks} if self.rollbacks else {}
        manifest["sha256"] = _manifest_digest(manifest)
        contents["state.json"] = json.dumps(manifest, indent=2).encode() + b"\n"
        replace_folder(folder, contents)

    def check_finite(self) -> None:
        """Raises RunError if a tensor has NaN or Inf."""
        for part in _PARTS:
            if key := first_not_finite(getattr(self, part)):
                raise RunError(
                    f"{part}/{key} has NaN or Inf after update {self.updates}: the learner's state is not saved; the "
                    "previous one is kept"
                )

    @classmethod
    def load(cls, folder: Path) -> LearnerState:
        """Read a state written by `save`.

        Raises UserError if the folder is missing, unreadable or of another format, or if a file differs from its
        checksum or was not written by `save`.
        """
        manifest = _read_manifest(folder)
        parts: dict[str, Any] = {part: {} for part in _PARTS}
        try:
            for name, expected in manifest["files"].items():
                for key, tensor in safetensors.torch.load(_read_checked(folder / name, expected)).items():
                    part, _, factor = key.partition("/")
                    if tensor.dtype != torch.float32:
                        raise TypeError(f"{key} is of {tensor.dtype}, not float32")
                    parts[part][factor] = tensor
            updates, steps, rollbacks = (operator.index(manifest.get(n, 0)) for n in ("updates", "steps", "rollbacks"))
        except (LookupError, TypeError, safetensors.SafetensorError) as error:
            raise UserError(f"{folder} is not a learner state: {type(error).__name__}: {error}") from error
        return cls(updates=updates, steps=steps, rollbacks=rollbacks, **parts)

    def check_fits(self, shapes: dict[str, torch.Size]) -> None:
        """Check that the state fits the model and its LoRA configuration.

        Raises UserError if factor names or shapes differ from `shapes`.
        """
        for part in _PARTS:
            saved = {name: tuple(tensor.shape) for name, tensor in getattr(self, part).items()}
            if part == "anchor" and not saved:
                continue
            for name in sorted(saved.keys() | shapes.keys()):
                wanted = tuple(shapes.get(name, ()))
                if saved.get(name, ()) != wanted:
                    raise UserError(
                        f"the saved learner state does not fit the model and model.lora: {part} of {name} is "
                        f"{saved.get(name, 'missing')}, the model has {wanted or 'no such factor'}"
                    )


def zeros_like(factors: Tensors) -> Tensors:
    return {name: torch.zeros_like(factor) for name, factor in factors.items()}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    content = _read(path, f"{folder} holds no complete learner state: there is no state.json in it")
    try:
        manifest: dict[str, Any] = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise UserError(f"{path} is damaged: it does not list the files of the state")
    if manifest.get("format") != FORMAT or set(manifest.get("files", ())) != set(_FILES):
        raise UserError(f"{path} is of format {manifest.get('format')!r}; this version reads {FORMAT!r}")
    if manifest.pop("sha256", None) != _manifest_digest(manifest):
        raise UserError(f"{path} is damaged: its checksum is not the one that was written")
    return manifest


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return _sha256(json.dumps(manifest, sort_keys=True).encode())


def _read_checked(path: Path, expected: dict[str, Any]) -> bytes:
    data = _read(path, f"the learner state is incomplete: {path} is missing", expected["bytes"])
    if _sha256(data) != expected["sha256"]:
        raise UserError(f"{path} is damaged: its checksum is not the one that was written")
    return data


def _read(path: Path, missing: str, most: int = MOST_BYTES) -> bytes:
    """The content of a file of at most `most` bytes. Raises UserError; its message is `missing` if there is no file."""
    try:
        return read_regular(path, most)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(missing) from None
    except OSError as error:  # such as a bad block
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
