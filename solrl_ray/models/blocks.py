"""The repeated blocks of a transformer, which are compiled one by one and decide where activations are kept."""

from __future__ import annotations

from torch import nn


def blocks(transformer: nn.Module) -> list[nn.Module]:
    """Members of the transformer's own lists of modules."""
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]
