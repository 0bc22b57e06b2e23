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
from dataclasses import dataclass
from typing import Literal, TypeAlias

Tool: TypeAlias = Literal["comfyui", "kohya"]

OURS, NATIVE, KOHYA, PEFT = "transformer.", "diffusion_model.", "lora_unet_", "base_model.model."
"""What a key begins with: diffusers, ComfyUI, kohya's scripts, PEFT."""

Table: TypeAlias = Mapping[str, tuple[str, ...]]
"""A linear of the published model → ours whose rows it has, from top to bottom; ``#`` is a block's number."""


def _table(theirs: str, ours: str, lines: str) -> dict[str, tuple[str, ...]]:
    """From lines ``name part part …``: a linear of their block, and those of our block."""
    entries = (line.split() for line in lines.strip().splitlines())
    return {f"{theirs}.{name}": tuple(f"{ours}.{part}" for part in parts) for name, *parts in entries}


_DOUBLE_ATTENTION = _table(
    "double_blocks.#",
    "transformer_blocks.#",
    """
    img_attn.qkv   attn.to_q attn.to_k attn.to_v
    img_attn.proj  attn.to_out.0
    txt_attn.qkv   attn.add_q_proj attn.add_k_proj attn.add_v_proj
    txt_attn.proj  attn.to_add_out
    """,
)
_FLUX = {
    **_DOUBLE_ATTENTION,
    **_table(
        "double_blocks.#",
        "transformer_blocks.#",
        """
        img_mlp.0    ff.net.0.proj
        img_mlp.2    ff.net.2
        img_mod.lin  norm1.linear
        txt_mlp.0    ff_context.net.0.proj
        txt_mlp.2    ff_context.net.2
        txt_mod.lin  norm1_context.linear
        """,
    ),
    **_table(
        "single_blocks.#",
        "single_transformer_blocks.#",
        """
        linear1         attn.to_q attn.to_k attn.to_v proj_mlp
        linear2         proj_out
        modulation.lin  norm.linear
        """,
    ),
}
_FLUX2 = {
    **_DOUBLE_ATTENTION,
    **_table(
        "double_blocks.#",
        "transformer_blocks.#",
        """
        img_mlp.0  ff.linear_in
        img_mlp.2  ff.linear_out
        txt_mlp.0  ff_context.linear_in
        txt_mlp.2  ff_context.linear_out
        """,
    ),
    **_table(
        "single_blocks.#",
        "single_transformer_blocks.#",
        """
        linear1  attn.to_qkv_mlp_proj
        linear2  attn.to_out
        """,
    ),
}
# Without the modulation of the text, whose halves are swapped in the last block.
_SD3 = _table(
    "joint_blocks.#",
    "transformer_blocks.#",
    """
    x_block.attn.qkv            attn.to_q attn.to_k attn.to_v
    x_block.attn.proj           attn.to_out.0
    x_block.attn2.qkv           attn2.to_q attn2.to_k attn2.to_v
    x_block.attn2.proj          attn2.to_out.0
    x_block.mlp.fc1             ff.net.0.proj
    x_block.mlp.fc2             ff.net.2
    x_block.adaLN_modulation.1  norm1.linear
    context_block.attn.qkv      attn.add_q_proj attn.add_k_proj attn.add_v_proj
    context_block.attn.proj     attn.to_add_out
    context_block.mlp.fc1       ff_context.net.0.proj
    context_block.mlp.fc2       ff_context.net.2
    """,
)
_Z_IMAGE = {
    name: parts
    for block in ("layers.#", "noise_refiner.#", "context_refiner.#")
    for name, parts in _table(
        block,
        block,
        """
        attention.qkv    attention.to_q attention.to_k attention.to_v
        attention.out    attention.to_out.0
        feed_forward.w1  feed_forward.w1
        feed_forward.w2  feed_forward.w2
        feed_forward.w3  feed_forward.w3
        """,
    ).items()
}
_WAN = _table(
    "blocks.#",
    "blocks.#",
    """
    self_attn.q   attn1.to_q
    self_attn.k   attn1.to_k
    self_attn.v   attn1.to_v
    self_attn.o   attn1.to_out.0
    cross_attn.q  attn2.to_q
    cross_attn.k  attn2.to_k
    cross_attn.v  attn2.to_v
    cross_attn.o  attn2.to_out.0
    ffn.0         ffn.net.0.proj
    ffn.2         ffn.net.2
    """,
)
_QWEN_IMAGE = {
    f"transformer_blocks.#.{name}": (f"transformer_blocks.#.{name}",)
    for name in (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("img_mod.1", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mod.1", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )
}


@dataclass(frozen=True, slots=True)
class Style:
    """How a tool names the linears of one model."""

    prefix: str
    published: bool
    """By the names of the published model; else by diffusers', one by one."""


@dataclass(frozen=True, slots=True)
class ToolNames:
    table: Table
    styles: Mapping[Tool, Style]


TOOL_NAMES: Mapping[str, ToolNames] = {
    "FluxTransformer2DModel": ToolNames(
        _FLUX, {"comfyui": Style(OURS, published=False), "kohya": Style(KOHYA, published=True)}
    ),
    "Flux2Transformer2DModel": ToolNames(
        _FLUX2, {"comfyui": Style(NATIVE, published=True), "kohya": Style(KOHYA, published=True)}
    ),
    "QwenImageTransformer2DModel": ToolNames(
        _QWEN_IMAGE, {"comfyui": Style(NATIVE, published=False), "kohya": Style(KOHYA, published=False)}
    ),
    "SD3Transformer2DModel": ToolNames(
        _SD3, {"comfyui": Style(OURS, published=False), "kohya": Style(KOHYA, published=True)}
    ),
    "WanTransformer3DModel": ToolNames(
        _WAN, {"comfyui": Style(NATIVE, published=True), "kohya": Style(KOHYA, published=True)}
    ),
    "ZImageTransformer2DModel": ToolNames(
        _Z_IMAGE, {"comfyui": Style(NATIVE, published=False), "kohya": Style(KOHYA, published=False)}
    ),
}
"""By the diffusers class of the transformer. The tools have no SANA."""


@dataclass(frozen=True, slots=True)
class Network:
    """The transformer that a LoRA is for."""

    name: str
    """Its diffusers class."""
    rows: Mapping[str, int]
    """Paths of all its linears → their output features."""


def key_of(prefix: str, name: str) -> str:
    """A linear's name in a file, such as ``lora_unet_double_blocks_0_img_attn_qkv``."""
    return prefix + (name.replace(".", "_") if prefix == KOHYA else name)


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
    found: dict[str, tuple[str, ...]] = {
        key_of(prefix, path): (path,) for path in network.rows for prefix in (OURS, NATIVE, KOHYA, PEFT)
    }
    if names := TOOL_NAMES.get(network.name):
        for theirs, parts in published_linears(names.table, network.rows).items():
            found |= {key_of(prefix, theirs): parts for prefix in (NATIVE, KOHYA)}
    return found
