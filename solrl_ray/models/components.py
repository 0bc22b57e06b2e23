"""Components of a loaded model and their names, its blocks, and module trees that share tensors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import nn

Component = Literal["text", "transformer", "vae", "preview_decoder"]
COMPONENTS: frozenset[Component] = frozenset({"text", "transformer", "vae"})
"""Components loaded by default. ``preview_decoder`` is the decoder of ``model.preview_decoder`` if set, else the VAE.
"""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def same_tensors(module: nn.Module) -> nn.Module:
    """A copy of the module tree whose parameters and buffers are the same objects."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, kept)


def blocks(transformer: nn.Module) -> list[nn.Module]:
    """The repeated blocks: members of the transformer's direct child `ModuleList`s. They are compiled one by one, and
    gradient checkpointing keeps activations between them.
    """
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def check_components(components: Collection[str]) -> frozenset[Component]:
    """The components as a set. Raises `ValueError` for an unknown component."""
    known = (*sorted(COMPONENTS), "preview_decoder")
    unknown = set(components) - set(known)
    if unknown:
        raise ValueError(f"unknown components {sorted(unknown)}; a model has {list(known)}")
    return frozenset(name for name in known if name in components)  # type: ignore[misc]


class TextEncoders(nn.Module):
    """A family's text encoders and tokenizers, inside the stock pipeline whose `encode_prompt` is used."""

    def __init__(self, pipeline_class: Any, encoders: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: encoder for name, encoder in encoders.items() if encoder is not None})
        given = {**encoders, **tokenizers}
        self.parts = {name: part for name, part in given.items() if part is not None}
        self.pipeline = pipeline_class(scheduler=None, vae=None, transformer=None, **given)
