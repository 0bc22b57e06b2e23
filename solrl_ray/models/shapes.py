"""The sizes of a checkpoint that a plan needs. Those of the supported models are stored in the package (``shapes/``).

`python benchmarks/model_shapes.py` writes these files from the architectures, and a test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from solrl_ray.config.schema import Model
from solrl_ray.quantization.planning import Linear

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FOLDER = Path(__file__).with_name("shapes")
TEXT_WIDTHS = ("caption_channels", "cap_feat_dim", "joint_attention_dim", "text_dim")
"""Keys of a transformer's ``config.json`` for the width of text tokens. Each file has one of them."""
SETTINGS = (
    *("in_channels", "num_attention_heads", "attention_head_dim", "dim", "pos_embed_max_size", "axes_lens"),
    *TEXT_WIDTHS,
    "pooled_projection_dim",
)
"""Keys of a transformer's ``config.json`` that `FamilySizes` reads."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Shape of a linear."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """Sizes of one checkpoint."""

    family: str
    """``model.family`` of the checkpoint."""
    transformer: Mapping[str, Any]
    """The transformer's ``config.json``, at least the keys in `SETTINGS`."""
    factor: int
    """Pixels per side of a latent cell."""
    blocks: int
    """Number of repeated blocks."""
    parameters: int
    """Number of parameters of the transformer."""
    buffers: int
    """Number of values in its buffers, such as a table of positions."""
    linears: Mapping[str, Linear]
    """Module path → linear, in module order."""
    texts: Sequence[int]
    """Number of parameters of each text encoder."""


def shipped(model: Model) -> ModelShapes | None:
    """The stored sizes of a checkpoint, looked up by its id; None if they are not stored.

    Several families can load one checkpoint. If none are stored for `model.family`, those for another family are
    returned.
    """
    known = [shapes for path, shapes in _shipped() if path == model.path]
    return next((shapes for shapes in known if shapes.family == model.family), known[0] if known else None)


@cache
def _shipped() -> tuple[tuple[str, ModelShapes], ...]:
    return tuple(_read(json.loads(file.read_bytes())) for file in sorted(FOLDER.glob("*.json")))


def _read(stored: dict[str, Any]) -> tuple[str, ModelShapes]:
    path, linears = stored.pop("path"), dict(_expanded(stored.pop("linears").items()))
    return path, ModelShapes(**stored, linears=linears)


def _expanded(entries: Iterable[tuple[str, list[list[int]]]]) -> Iterable[tuple[str, LinearShape]]:
    for key, ranges in entries:
        for inputs, outputs, first, end in ranges:
            for index in range(first, end):
                yield key.replace(".*.", f".{index}.", 1), LinearShape(inputs, outputs)
