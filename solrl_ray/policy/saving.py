"""Writes LoRA files: ours, of the trained strength in every reader, such as ``pipe.load_lora_weights(folder)`` of stock
diffusers, and as ComfyUI and kohya's scripts have them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

import solrl_ray
from solrl_ray.common.files import replace_file
from solrl_ray.common.module_paths import ends_in
from solrl_ray.common.safetensors_file import written
from solrl_ray.config.schema import Lora, Model
from solrl_ray.errors import UserError
from solrl_ray.policy.tool_names import OURS, Network, Tool, key_of, published_linears

FILE = "pytorch_lora_weights.safetensors"
"""The name that `load_lora_weights` looks for in a folder."""
METADATA_KEY = "lora_adapter_metadata"
"""`LORA_ADAPTER_METADATA_KEY` of `diffusers.loaders.lora_base`, whose import takes seconds."""


IMPLEMENTATIONS = {
    "comfyui": "https://github.com/comfyanonymous/ComfyUI",
    "kohya": "https://github.com/kohya-ss/sd-scripts",
}
"""Format of ``solrl export`` → whose names of modules it has, as ModelSpec names them; others have diffusers'."""


def save_lora(folder: Path, factors: Mapping[str, Tensor], lora: Lora, convolutions: Collection[str] = ()) -> Path:
    """Write `stock_lora` to ``folder/pytorch_lora_weights.safetensors``, atomically, and return the file."""
    replace_file(folder / FILE, stock_lora(factors, lora, convolutions))
    return folder / FILE


def stock_lora(
    factors: Mapping[str, Tensor],
    lora: Lora,
    convolutions: Collection[str] = (),
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The bytes of a LoRA file for diffusers.

    Keys are ``transformer.<module>.lora_A.weight`` and ``….lora_B.weight`` in float32. B is multiplied by alpha / rank,
    and alpha is the rank. Else no file would do for all readers: diffusers needs alpha in the header, its `LoraConfig`;
    ComfyUI in keys ``<module>.alpha``, which diffusers refuses for all families but FLUX.1.

    `convolutions`: path endings of linears that are 1×1 convolutions in the checkpoint (the family's
    `CONVOLUTIONS`); their factors get the trailing [1, 1] of a convolution's weight.
    """
    tensors = {}
    for name in sorted(factors):
        factor = factors[name].detach().cpu().contiguous() * (lora.scaling if name.endswith(".lora_B") else 1.0)
        module = name.rpartition(".")[0]
        is_convolution = ends_in(module, convolutions)
        tensors[f"{OURS}{name}.weight"] = factor[:, :, None, None] if is_convolution else factor
    adapter = {"r": lora.rank, "lora_alpha": lora.rank, "target_modules": sorted(lora.targets)}
    header = {OURS + name: value for name, value in adapter.items()}
    return written(tensors, {**metadata, METADATA_KEY: json.dumps(header, sort_keys=True)})


def shown_metadata(tool: str, title: str, what: str, model: Model) -> dict[str, str]:
    """What tools show of a LoRA file: Stability's ModelSpec (https://github.com/Stability-AI/ModelSpec), and names of
    kohya's scripts. Without the date, so that the same policy gives the same bytes.

    Args:
        tool: the format of ``solrl export``.
        what: which policy it is, in words.
    """
    base, shape = Path(model.path).name, model.shapes[0]  # no folders of this machine
    return {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{base.lower().replace('.', '-')}/lora",
        "modelspec.implementation": IMPLEMENTATIONS.get(tool, "diffusers"),
        "modelspec.title": title,
        "modelspec.resolution": f"{shape.width}x{shape.height}",
        "modelspec.description": f"LoRA of {base} by solrl_ray {solrl_ray.__version__}: {what}",
        "ss_sd_model_name": base,
        "ss_output_name": title,
        "ss_network_dim": str(model.lora.rank),
        "ss_network_alpha": f"{model.lora.alpha if tool == 'kohya' else model.lora.rank:g}",  # as the file applies it
    }


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
    names = network.tool_names
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
        tensors[f"{key}.{b}.weight"] = up if tool == "kohya" else up * lora.scaling
        if tool == "kohya":
            tensors[f"{key}.alpha"] = torch.tensor(lora.alpha * len(down) / lora.rank)
    return tensors


def _joined(factors: Mapping[str, Tensor], parts: Iterable[str], rows: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """A [sum of ranks, in] and B [sum of rows, sum of ranks] of linears on one input, one below the other."""
    a = [factors[f"{part}.lora_A"] for part in parts if f"{part}.lora_A" in factors]
    # Without columns where it is not trained: block_diag leaves its rows zero.
    b = [factors.get(f"{part}.lora_B", torch.zeros(rows[part], 0)) for part in parts]
    return torch.cat(a), torch.block_diag(*b)
