"""The learner's whole state, independent of world size, and its folder on disk.

A state folder holds ``policy.safetensors`` (``default/…``, ``old/…``, ``ema/…`` and maybe ``anchor/…`` factors),
``optimizer.safetensors`` (``exp_avg/…`` and ``exp_avg_sq/…``) and ``state.json`` with the counters, each file's size
and SHA-256, and its own. It gets its name only when it is complete and on the disk.
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
    """One policy of a learner: LoRA factors by name, float32 on the CPU, which must not be changed."""

    factors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState(Portable, read_only=True):
    """All that the next update depends on. Tensors are float32 on the CPU, by LoRA factor, and must not be changed."""

    updates: int
    """Iterations done: also the revision of `old`."""
    steps: int
    """Optimiser steps done: AdamW's step count, the EMA's and the decays'."""
    default: Tensors
    old: Tensors
    ema: Tensors
    exp_avg: Tensors
    exp_avg_sq: Tensors
    anchor: Tensors = field(default_factory=dict)
    """Empty if the objective has none."""
    rollbacks: int = 0
    """How often the run has gone back to a checkpoint; each makes steps smaller (`schedules.learning_rate`)."""

    @classmethod
    def first(cls, factors: Tensors) -> LearnerState:
        """The state before the first update, if all policies have these factors."""

        def copy() -> Tensors:  # a file holds no tensor twice
            return {name: factor.clone() for name, factor in factors.items()}

        mean, square = zeros_like(factors), zeros_like(factors)
        return cls(updates=0, steps=0, default=copy(), old=copy(), ema=copy(), exp_avg=mean, exp_avg_sq=square)

    def save(self, folder: Path) -> None:
        """Write the state; `folder` appears when all of it is on the disk.

        A resumed run makes the same update again. An existing folder is then the same state or a damaged one, and is
        replaced.

        Raises RunError: a tensor with NaN or Inf. Nothing is written, so the state before can be resumed.
        """
        self.check_finite()
        contents: dict[str, bytes] = {}
        for name, parts in _FILES.items():
            tensors = {f"{part}/{key}": tensor for part in parts for key, tensor in getattr(self, part).items()}
            # As NumPy's arrays: of tensors, the package refuses those that share memory.
            contents[name] = safetensors.numpy.save(
                {key: each.detach().contiguous().numpy() for key, each in tensors.items()}
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
                    "one before stays"
                )

    @classmethod
    def load(cls, folder: Path) -> LearnerState:
        """Read a state written by `save`.

        Raises UserError: the folder is missing, of another format, the disk does not give it, any file differs from its
        checksum, or was not written by `save`.
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
            raise UserError(f"{folder} is no state of a learner: {type(error).__name__}: {error}") from error
        return cls(updates=updates, steps=steps, rollbacks=rollbacks, **parts)

    def check_fits(self, shapes: dict[str, torch.Size]) -> None:
        """Refuse a state of another model or LoRA configuration.

        Raises UserError: factor names or shapes differ from `shapes`.
        """
        for part in _PARTS:
            found = {name: tuple(tensor.shape) for name, tensor in getattr(self, part).items()}
            if part == "anchor" and not found:
                continue
            for name in sorted(found.keys() | shapes.keys()):
                wanted = tuple(shapes.get(name, ()))
                if found.get(name, ()) != wanted:
                    raise UserError(
                        f"the saved learner state does not fit the model and model.lora: {part} of {name} is "
                        f"{found.get(name, 'missing')}, the model has {wanted or 'no such factor'}"
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
        raise UserError(f"{path} is damaged: it does not say which files belong to it")
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
    """The content of a file of at most so many bytes. Raises UserError, which is `missing` if there is none."""
    try:
        return read_regular(path, most)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(missing) from None
    except OSError as error:  # such as a bad block
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
