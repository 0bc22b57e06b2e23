"""Names of LoRA modules in files of ComfyUI and kohya's scripts.

Models that these tools load as they were first published have another tree of modules than diffusers: one linear there
may hold the rows of several of ours.

======= ================================================== ==================================================
tool    source                                             reads
======= ================================================== ==================================================
comfyui ``comfy/lora.py``, and in ``comfy/utils.py``       the published names after ``diffusion_model.``;
        ``flux_to_diffusers``, ``mmdit_to_diffusers``,     for some models diffusers' after ``transformer.``
        ``z_image_to_diffusers``                           or ``diffusion_model.``, each for its rows
kohya   sd-scripts ``networks/lora_flux.py``,              names of the model that it trains after
        ``lora_sd3.py``; musubi-tuner ``networks/lora.py`` ``lora_unet_``, with underscores for dots
======= ================================================== ==================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Tool: TypeAlias = Literal["comfyui", "kohya"]

OURS, NATIVE, KOHYA, PEFT = "transformer.", "diffusion_model.", "lora_unet_", "base_model.model."
"""What a key begins with: diffusers, ComfyUI, kohya's scripts, PEFT."""
DOTTED = (OURS, NATIVE, PEFT, f"model.{NATIVE}", "")
"""All that may stand before a name with dots. Nothing: DiffSynth-Studio, and distilled models."""
UNDERSCORED = (KOHYA, "lora_transformer_", "lycoris_")
"""Before one with underscores: kohya's scripts, OneTrainer, LyCORIS."""

Table: TypeAlias = Mapping[str, tuple[str, ...]]
"""A linear of the published model → ours whose rows it has, from top to bottom; ``#`` is a block's number."""


def table(theirs: str, ours: str, lines: str) -> dict[str, tuple[str, ...]]:
    """From lines ``name part part …``: a linear of their block, and those of our block."""
    entries = (line.split() for line in lines.strip().splitlines())
    return {f"{theirs}.{name}": tuple(f"{ours}.{part}" for part in parts) for name, *parts in entries}


@dataclass(frozen=True, slots=True)
class Style:
    """How a tool names the linears of one model."""

    prefix: str
    published: bool
    """By the names of the published model; else by diffusers', one by one."""


@dataclass(frozen=True, slots=True)
class ToolNames:
    """What a family's file says of them, `TOOL_NAMES` of its class."""

    table: Table
    styles: Mapping[Tool, Style]
    others: Table = field(default_factory=dict)
    """Names of further trainers, which are only read."""


@dataclass(frozen=True, slots=True)
class Network:
    """The transformer that a LoRA is for."""

    name: str
    """Its diffusers class."""
    rows: Mapping[str, int]
    """Paths of all its linears → their output features."""
    tool_names: ToolNames | None
    """None: the tools do not have it."""


def key_of(prefix: str, name: str) -> str:
    """A linear's name in a file, such as ``lora_unet_double_blocks_0_img_attn_qkv``."""
    return prefix + (name.replace(".", "_") if prefix in UNDERSCORED else name)


def published_linears(table: Table, linears: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The entries of `table` that have one of `linears`, with their blocks' numbers."""
    theirs_of = {part: theirs for theirs, parts in table.items() for part in parts}
    found = {}
    for linear in linears:
        pattern, numbers = re.subn(r"(?<=\.)\d+(?=\.)", "#", linear, count=1)
        if numbers and pattern in theirs_of:
            block = linear.split(".")[pattern.split(".").index("#")]
            theirs = theirs_of[pattern]
            found[theirs.replace("#", block)] = tuple(part.replace("#", block) for part in table[theirs])
    return found


def keys_of(network: Network) -> dict[str, tuple[str, ...]]:
    """Every name that a file may have for a linear → our linears whose rows it holds, from top to bottom."""
    names: dict[str, tuple[str, ...]] = {path: (path,) for path in network.rows}
    for known in (network.tool_names.table, network.tool_names.others) if network.tool_names else ():
        names |= published_linears(known, network.rows)
    return {key_of(prefix, name): parts for name, parts in names.items() for prefix in (*DOTTED, *UNDERSCORED)}
