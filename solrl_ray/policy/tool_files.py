"""LoRA files as ComfyUI and kohya's scripts read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from solrl_ray.config.schema import Lora
from solrl_ray.errors import UserError
from solrl_ray.policy.tool_names import TOOL_NAMES, Network, Tool, key_of, published_linears


def tool_tensors(tool: Tool, factors: Mapping[str, Tensor], lora: Lora, network: Network) -> dict[str, Tensor]:
    """The tensors of a file for `tool`, float32 as the factors.

    =======  =================================================================================================
    comfyui  ``….lora_A.weight``, ``….lora_B.weight``. B is multiplied by alpha / rank, as in `save_lora`, since
             alpha is optional there, and readers other than ComfyUI differ in whether they take it
    kohya    ``….lora_down.weight``, ``….lora_up.weight``, ``….alpha``, with the factors as they are
    =======  =================================================================================================

    If one linear of the tool's model has the rows of several of ours, it gets one LoRA with a block-diagonal B: exact,
    with the sum of their ranks and alphas.

    Raises UserError: the tool does not run this model, or does not know one of the linears.
    """
    names = TOOL_NAMES.get(network.name)
    if names is None:
        raise UserError(
            f"--format is {tool}, which has no {network.name}; diffusers has, so the format must be diffusers or "
            "checkpoint."
        )
    style = names.styles[tool]
    trained = sorted({name.rpartition(".")[0] for name in factors})
    places = published_linears(names.table, trained)
    if unknown := set(trained).difference(*places.values()):
        raise UserError(
            f"--format is {tool}, which knows no LoRA of {min(unknown)}, one of the linears that model.lora.targets "
            "names; the format must be diffusers or checkpoint."
        )
    if not style.published:
        places = {path: (path,) for path in trained}
    a, b = ("lora_down", "lora_up") if tool == "kohya" else ("lora_A", "lora_B")
    tensors = {}
    for theirs, parts in places.items():
        key, (down, up) = key_of(style.prefix, theirs), _joined(factors, parts, network.rows)
        tensors[f"{key}.{a}.weight"] = down
        tensors[f"{key}.{b}.weight"] = up if tool == "kohya" else up * (lora.alpha / lora.rank)
        if tool == "kohya":
            tensors[f"{key}.alpha"] = torch.tensor(lora.alpha * len(down) / lora.rank)
    return tensors


def _joined(factors: Mapping[str, Tensor], parts: Iterable[str], rows: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """A [sum of ranks, in] and B [sum of rows, sum of ranks] of linears on one input, one below the other."""
    a = [factors[f"{part}.lora_A"] for part in parts if f"{part}.lora_A" in factors]
    # Without columns where it is not trained: block_diag leaves its rows zero.
    b = [factors.get(f"{part}.lora_B", torch.zeros(rows[part], 0)) for part in parts]
    return torch.cat(a), torch.block_diag(*b)
