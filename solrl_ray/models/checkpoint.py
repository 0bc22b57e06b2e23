"""Loads the parts of a diffusers pipeline checkpoint: only as known classes, never with remote code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.models.libraries import diffusers, torch

if TYPE_CHECKING:
    from torch import nn

KEY = "model.path"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder or Hugging Face repository with a ``model_index.json`` that names the class of each part."""

    path: str
    """The configured path or Hugging Face id."""
    key: str
    """The configuration key to name in errors, possibly with the file that sets it."""
    source: Path | str
    """Local folder or Hugging Face id."""
    index: Mapping[str, Any]
    """Content of ``model_index.json``."""

    @classmethod
    def open(cls, path: str, family: str, pipeline_class: str, key: str = KEY) -> Checkpoint:
        """Read the index. Raises `UserError` if there is no checkpoint, or one of another family."""
        source = paths.checkpoint(path, key)
        index = paths.read_json(source, "model_index.json", key)
        if index.get("_class_name") != pipeline_class:
            raise UserError(
                f"{key} is {path!r}, a checkpoint of {index.get('_class_name')!r}, "
                f"but model.family {family!r} needs one of {pipeline_class!r}."
            )
        return cls(path=path, key=key, source=source, index=index)

    def has(self, part: str) -> bool:
        """Whether the checkpoint has this part. The index may list an optional part as null."""
        return self._class_name(part) is not None

    def settings(self, part: str) -> dict[str, Any]:
        """The part's ``config.json``."""
        return paths.read_json(self.source, f"{part}/config.json", self.key)

    def load(self, part: str, classes: Collection[str], dtype: torch.dtype) -> Any:
        """Load a diffusers part with its weights in `dtype`. Raises `UserError` if its class is not among `classes`."""
        part_class = getattr(diffusers, self.check_class(part, classes))
        return paths.load_weights(part_class, self.source, self.key, subfolder=part, torch_dtype=dtype)

    def load_encoder(self, part: str, dtype: torch.dtype) -> Any:
        """Load a text encoder (any class of transformers) with its weights in `dtype`."""
        part_class = self._of_transformers(part)
        return paths.load_weights(part_class, self.source, self.key, subfolder=part, dtype=dtype)

    def text_skeleton(self, part: str) -> Any:
        """A text encoder with the checkpoint's sizes and untrained weights."""
        part_class = self._of_transformers(part)
        return part_class(part_class.config_class(**self.settings(part)))

    def load_tokenizer(self, part: str) -> Any:
        """Load a tokenizer. Raises `UserError` if it cannot be read."""
        return paths.load_tokenizer(self._of_transformers(part), self.source, self.key, subfolder=part)

    def load_processor(self, part: str) -> Any:
        """Load the image processor of a text encoder. Raises `UserError` if it cannot be read."""
        try:
            return self._of_transformers(part).from_pretrained(str(self.source), subfolder=part)
        except (OSError, ValueError) as error:
            raise UserError(paths.unreadable(self.source, part, self.key, error)) from error

    def check_class(self, part: str, classes: Collection[str]) -> str:
        """The name of the part's class. Raises `UserError` if it is not among `classes`."""
        name = self._class_name(part)
        if name not in classes:
            raise UserError(
                f"{self.key} is {self.path!r}, whose {part} is a {name!r}; supported are {', '.join(sorted(classes))}."
            )
        return str(name)

    def _class_name(self, part: str) -> str | None:
        entry = self.index.get(part) or (None, None)
        return entry[1] if entry[1] is None else str(entry[1])

    def _of_transformers(self, part: str) -> Any:
        import transformers  # late: only the encoder loads such parts

        name = self._class_name(part)
        part_class = getattr(transformers, name, None) if name else None
        if part_class is None:
            raise UserError(
                f"{self.key} is {self.path!r}, whose {part} is a {name!r}, "
                f"which transformers {transformers.__version__} does not have."
            )
        return part_class


def freeze(module: nn.Module) -> nn.Module:
    """Switch to eval mode (a module built from its configuration has dropout) and disable gradients."""
    return module.eval().requires_grad_(False)


def fingerprint(part: Any) -> str:
    """SHA-256 over everything that determines the output of a part, which is one of: a text or image encoder
    (configuration and all weights), a tokenizer, an image processor.

    Reads all weights once.
    """
    digest = hashlib.sha256()
    if not hasattr(part, "state_dict"):
        if not hasattr(part, "backend_tokenizer"):
            return hashlib.sha256(json.dumps(part.to_dict(), sort_keys=True, default=str).encode()).hexdigest()
        digest.update(part.backend_tokenizer.to_str().encode())
        digest.update(str(part.model_max_length).encode())
        digest.update((getattr(part, "chat_template", None) or "").encode())
        return digest.hexdigest()
    config = part.config.to_dict() if hasattr(part.config, "to_dict") else part.config  # transformers, diffusers
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    with ThreadPoolExecutor() as threads:  # hashing releases Python's global lock
        for weight_digest in threads.map(_weight_digest, sorted(part.state_dict().items())):
            digest.update(weight_digest)
    return digest.hexdigest()


def _weight_digest(named: tuple[str, torch.Tensor]) -> bytes:
    name, weight = named
    digest = hashlib.sha256(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
    digest.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
