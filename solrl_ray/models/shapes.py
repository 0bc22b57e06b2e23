"""The sizes of a checkpoint that a plan needs; those of the shipped models are in the package.

`python benchmarks/model_shapes.py` writes them from the architectures, and a test compares the two.
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
"""Keys of a transformer's ``config.json`` for the width of a text's tokens; it has one of them."""
SETTINGS = (
    *("in_channels", "num_attention_heads", "attention_head_dim", "dim", "pos_embed_max_size", "axes_lens"),
    *TEXT_WIDTHS,
    "pooled_projection_dim",
)
"""Keys of a transformer's ``config.json`` that `FamilySizes` reads."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    family: str
    """``model.family`` of the checkpoint."""
    transformer: Mapping[str, Any]
    """Its ``config.json``, at least `SETTINGS`."""
    factor: int
    """Pixels a latent cell and side."""
    blocks: int
    parameters: int
    buffers: int
    """Values in tensors that are no parameters, such as a table of positions."""
    linears: Mapping[str, Linear]
    """By module path, in module order."""
    texts: Sequence[int]
    """Parameters of each text encoder."""


def shipped(model: Model) -> ModelShapes | None:
    """The shapes of a checkpoint that this package knows by its id; None for others. Several families may take one
    checkpoint; for another family they are those of one that does.
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
