"""LoRA files that stock diffusers loads: ``pipe.load_lora_weights(folder)``, with the right alpha."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import safetensors
from safetensors.torch import save
from torch import Tensor

from solrl_ray.common.files import replace_file
from solrl_ray.common.module_paths import ends_in
from solrl_ray.config.schema import Lora
from solrl_ray.errors import UserError

FILE = "pytorch_lora_weights.safetensors"
"""The name that `load_lora_weights` looks for in a folder."""
PREFIX = "transformer."
METADATA_KEY = "lora_adapter_metadata"
"""`LORA_ADAPTER_METADATA_KEY` of `diffusers.loaders.lora_base`, whose import takes seconds."""


def save_lora(folder: Path, factors: Mapping[str, Tensor], lora: Lora, convolutions: Collection[str] = ()) -> Path:
    """Write `factors` to ``folder/pytorch_lora_weights.safetensors``, atomically, and return the file.

    Keys are ``transformer.<module>.lora_A.weight`` and ``….lora_B.weight`` in float32. The header is diffusers'
    `LoraConfig`; without it, diffusers would take the rank as alpha.

    Args:
        convolutions: path endings of linears that are 1×1 convolutions in the checkpoint (`models.CONVOLUTIONS`); their
            factors get the trailing [1, 1] of a convolution's weight.
    """
    tensors = {}
    for name in sorted(factors):
        factor = factors[name].detach().cpu().contiguous()
        module = name.rpartition(".")[0]
        is_convolution = ends_in(module, convolutions)
        tensors[f"{PREFIX}{name}.weight"] = factor[:, :, None, None] if is_convolution else factor
    adapter = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(lora.targets)}
    header = {PREFIX + name: value for name, value in adapter.items()}
    content = save(tensors, metadata={METADATA_KEY: json.dumps(header, sort_keys=True)})
    replace_file(folder / FILE, content)
    return folder / FILE


def load_lora(path: Path) -> tuple[dict[str, Tensor], Lora]:
    """Read a file that `save_lora` or diffusers wrote with its metadata; `path` is the file or its folder.

    Returns the float32 factors by name in sorted order, those of 1×1 convolutions as matrices, and rank, alpha and
    targets.

    Raises:
        UserError: the file is missing, damaged, without adapter metadata or holds more than LoRA factors.
    """
    file = path / FILE if path.is_dir() else path
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            header = (content.metadata() or {}).get(METADATA_KEY)
            tensors = {key: content.get_tensor(key).float() for key in content.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"The LoRA file {file} cannot be read: {error}") from error
    if header is None:
        raise UserError(
            f"The LoRA file {file} does not say its alpha (no {METADATA_KEY} in the header); "
            "save it with the pipeline's save_lora_weights and transformer_lora_adapter_metadata."
        )
    factors = {}
    for key in sorted(tensors):
        name = key.removeprefix(PREFIX).removesuffix(".weight")
        if f"{PREFIX}{name}.weight" != key or not name.endswith((".lora_A", ".lora_B")):
            raise UserError(f"The LoRA file {file} holds {key}, which is not a LoRA factor of a transformer.")
        tensor = tensors[key]
        factors[name] = tensor[:, :, 0, 0] if tensor.shape[2:] == (1, 1) else tensor
    return factors, _adapter(header, file)


def _adapter(header: str, file: Path) -> Lora:
    """A LoRA file's metadata. Raises UserError if it is no adapter of a transformer."""
    try:
        adapter = {name.removeprefix(PREFIX): value for name, value in json.loads(header).items()}
        return Lora(rank=adapter["r"], alpha=adapter["lora_alpha"], targets=sorted(adapter["target_modules"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"The header of the LoRA file {file} ({METADATA_KEY}) does not state r, lora_alpha and target_modules of "
            f"a transformer's adapter: {header[:60]}"
        ) from error
