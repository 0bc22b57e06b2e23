"""LoRA files of the trained strength in every reader, such as ``pipe.load_lora_weights(folder)`` of stock diffusers."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from solrl_ray.common.files import replace_file
from solrl_ray.common.module_paths import ends_in
from solrl_ray.config.schema import Lora
from solrl_ray.policy.tool_names import OURS

FILE = "pytorch_lora_weights.safetensors"
"""The name that `load_lora_weights` looks for in a folder."""
METADATA_KEY = "lora_adapter_metadata"
"""`LORA_ADAPTER_METADATA_KEY` of `diffusers.loaders.lora_base`, whose import takes seconds."""


def save_lora(folder: Path, factors: Mapping[str, Tensor], lora: Lora, convolutions: Collection[str] = ()) -> Path:
    """Write `factors` to ``folder/pytorch_lora_weights.safetensors``, atomically, and return the file.

    Keys are ``transformer.<module>.lora_A.weight`` and ``….lora_B.weight`` in float32. B is multiplied by alpha / rank,
    and alpha is the rank. Else no file would do for all readers: diffusers needs alpha in the header, its `LoraConfig`;
    ComfyUI in keys ``<module>.alpha``, which diffusers refuses for all families but FLUX.1.

    `convolutions`: path endings of linears that are 1×1 convolutions in the checkpoint (`models.Family`); their factors
    get the trailing [1, 1] of a convolution's weight.
    """
    tensors = {}
    for name in sorted(factors):
        factor = factors[name].detach().cpu().contiguous() * (
            lora.alpha / lora.rank if name.endswith(".lora_B") else 1.0
        )
        module = name.rpartition(".")[0]
        is_convolution = ends_in(module, convolutions)
        tensors[f"{OURS}{name}.weight"] = factor[:, :, None, None] if is_convolution else factor
    adapter = {"r": lora.rank, "lora_alpha": lora.rank, "target_modules": sorted(lora.targets)}
    header = {OURS + name: value for name, value in adapter.items()}
    content = save(tensors, metadata={METADATA_KEY: json.dumps(header, sort_keys=True)})
    replace_file(folder / FILE, content)
    return folder / FILE
