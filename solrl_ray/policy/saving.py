"""Writes LoRA files for diffusers (``pipe.load_lora_weights(folder)``), ComfyUI and kohya's scripts.

Every reader applies them with the trained strength.
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
"""The file name that `load_lora_weights` looks for in a folder."""
METADATA_KEY = "lora_adapter_metadata"
"""`LORA_ADAPTER_METADATA_KEY` of `diffusers.loaders.lora_base`, whose import takes seconds."""


IMPLEMENTATIONS = {
    "comfyui": "https://github.com/comfyanonymous/ComfyUI",
    "kohya": "https://github.com/kohya-ss/sd-scripts",
}
"""Format of ``solrl export`` → the implementation whose module names it uses, for ModelSpec. Others use diffusers'."""


def save_lora(folder: Path, factors: Mapping[str, Tensor], lora: Lora, convolutions: Collection[str] = ()) -> Path:
    """Write `stock_lora` atomically to ``folder/pytorch_lora_weights.safetensors``; returns the file's path."""
    replace_file(folder / FILE, stock_lora(factors, lora, convolutions))
    return folder / FILE


def stock_lora(
    factors: Mapping[str, Tensor],
    lora: Lora,
    convolutions: Collection[str] = (),
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The bytes of a LoRA file for diffusers.

    Keys are ``transformer.<module>.lora_A.weight`` and ``….lora_B.weight``, in float32. B is multiplied by
    alpha / rank, and the stated alpha is the rank. With another alpha no file would suit all readers: diffusers wants
    it in the header (`LoraConfig`), ComfyUI in keys ``<module>.alpha``, which diffusers refuses except for FLUX.1.

    Args:
        convolutions: path endings of linears that are 1×1 convolutions in the checkpoint (the family's `CONVOLUTIONS`);
            their factors get the trailing [1, 1] of a convolution's weight.
        metadata: further entries of the file's header.
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
    """Metadata that tools display: Stability's ModelSpec (https://github.com/Stability-AI/ModelSpec) and kohya's keys.

    It has no date, so that the same policy gives the same bytes.

    Args:
        tool: the format of ``solrl export``.
        title: title of the LoRA.
        what: a description of the policy.
    """
    base, shape = Path(model.path).name, model.shapes[0]  # only the name: paths of this machine stay private
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
    """The tensors of a file for `tool`, float32.

    - ``comfyui``: ``….lora_A.weight`` and ``….lora_B.weight``. B is multiplied by alpha / rank, as in `stock_lora`:
      alpha is optional in this format, and some readers ignore it.
    - ``kohya``: ``….lora_down.weight``, ``….lora_up.weight`` and ``….alpha``, with unchanged factors.

    If one linear of the tool's model has the rows of several of ours, it gets one LoRA with a block-diagonal B. This is
    exact; its rank and alpha are the sums of theirs.

    Raises UserError if the tool does not support this model, or does not know one of the linears.
    """
    names = network.tool_names
    if names is None:
        raise UserError(
            f"--format is {tool}, which does not support {network.name}. Use --format diffusers or checkpoint."
        )
    style = names.styles[tool]
    trained = sorted({name.rpartition(".")[0] for name in factors})
    targets = published_linears(names.table, trained)
    if unknown := set(trained).difference(*targets.values()):
        raise UserError(
            f"--format is {tool}, which knows no LoRA of {min(unknown)}, a linear of model.lora.targets. Use --format "
            "diffusers or checkpoint."
        )
    if not style.published:
        targets = {path: (path,) for path in trained}
    a, b = ("lora_down", "lora_up") if tool == "kohya" else ("lora_A", "lora_B")
    tensors = {}
    for theirs, parts in targets.items():
        key, (down, up) = key_of(style.prefix, theirs), _joined(factors, parts, network.rows)
        tensors[f"{key}.{a}.weight"] = down
        tensors[f"{key}.{b}.weight"] = up if tool == "kohya" else up * lora.scaling
        if tool == "kohya":
            tensors[f"{key}.alpha"] = torch.tensor(lora.alpha * len(down) / lora.rank)
    return tensors


def _joined(factors: Mapping[str, Tensor], parts: Iterable[str], rows: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """Join linears on one input, stacked by rows: A [sum of ranks, in] and B [sum of rows, sum of ranks]."""
    a = [factors[f"{part}.lora_A"] for part in parts if f"{part}.lora_A" in factors]
    # An untrained part gets no columns, so that block_diag leaves its rows zero.
    b = [factors.get(f"{part}.lora_B", torch.zeros(rows[part], 0)) for part in parts]
    return torch.cat(a), torch.block_diag(*b)
