"""Names of LoRA modules in files of ComfyUI and kohya's scripts.

These tools load models as first published, whose module tree differs from diffusers'. One linear there may hold the
rows of several of ours.

- ComfyUI reads published names with the prefix ``diffusion_model.``. For some models it also reads diffusers' names,
  with the prefix ``transformer.`` or ``diffusion_model.``, each for its rows. Sources: ``comfy/lora.py``; in
  ``comfy/utils.py`` ``flux_to_diffusers``, ``mmdit_to_diffusers``, ``z_image_to_diffusers``.
- kohya's scripts read names of the model that they train, with the prefix ``lora_unet_`` and underscores for dots.
  Sources: sd-scripts ``networks/lora_flux.py``, ``lora_sd3.py``; musubi-tuner ``networks/lora.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Tool: TypeAlias = Literal["comfyui", "kohya"]

OURS, NATIVE, KOHYA, PEFT = "transformer.", "diffusion_model.", "lora_unet_", "base_model.model."
"""Prefixes of keys in files of diffusers, ComfyUI, kohya's scripts and PEFT."""
DOTTED = (OURS, NATIVE, PEFT, f"model.{NATIVE}", "")
"""Prefixes of names with dots. DiffSynth-Studio and distilled models use none."""
UNDERSCORED = (KOHYA, "lora_transformer_", "lycoris_")
"""Prefixes of names with underscores: kohya's scripts, OneTrainer, LyCORIS."""

Table: TypeAlias = Mapping[str, tuple[str, ...]]
"""A linear of the published model → our linears whose rows it has, from top to bottom; ``#`` is the block number."""


def table(theirs: str, ours: str, lines: str) -> dict[str, tuple[str, ...]]:
    """Parse lines ``name part part …``: a linear of the block `theirs`, then the linears of the block `ours`."""
    entries = (line.split() for line in lines.strip().splitlines())
    return {f"{theirs}.{name}": tuple(f"{ours}.{part}" for part in parts) for name, *parts in entries}


@dataclass(frozen=True, slots=True)
class Style:
    """A tool's naming of the linears of one model."""

    prefix: str
    published: bool
    """True: names of the published model. False: diffusers' names, one LoRA per linear."""


@dataclass(frozen=True, slots=True)
class ToolNames:
    """The naming of a model family's linears in each tool; `TOOL_NAMES` of the family's class."""

    table: Table
    styles: Mapping[Tool, Style]
    others: Table = field(default_factory=dict)
    """Names of further trainers, used only for reading."""


@dataclass(frozen=True, slots=True)
class Network:
    """The transformer of a LoRA."""

    name: str
    """Name of its diffusers class."""
    rows: Mapping[str, int]
    """Path of each linear → its number of output features."""
    tool_names: ToolNames | None
    """None: the tools do not support it."""


def key_of(prefix: str, name: str) -> str:
    """The name of a linear in a file, such as ``lora_unet_double_blocks_0_img_attn_qkv``."""
    return prefix + (name.replace(".", "_") if prefix in UNDERSCORED else name)


def published_linears(table: Table, linears: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The entries of `table` that contain one of `linears`, with block numbers filled in."""
    theirs_of = {part: theirs for theirs, parts in table.items() for part in parts}
    published = {}
    for linear in linears:
        pattern, numbers = re.subn(r"(?<=\.)\d+(?=\.)", "#", linear, count=1)
        if numbers and pattern in theirs_of:
            block = linear.split(".")[pattern.split(".").index("#")]
            theirs = theirs_of[pattern]
            published[theirs.replace("#", block)] = tuple(part.replace("#", block) for part in table[theirs])
    return published


def keys_of(network: Network) -> dict[str, tuple[str, ...]]:
    """Every name of a linear that a file may use → our linears whose rows it holds, from top to bottom."""
    names: dict[str, tuple[str, ...]] = {path: (path,) for path in network.rows}
    for known in (network.tool_names.table, network.tool_names.others) if network.tool_names else ():
        names |= published_linears(known, network.rows)
    return {key_of(prefix, name): parts for name, parts in names.items() for prefix in (*DOTTED, *UNDERSCORED)}
