"""LoRA files of the trained strength in every reader, such as ``pipe.load_lora_weights(folder)`` of stock diffusers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

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
READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
"""Fields of PEFT's `LoraConfig` that say what the factors mean."""
NEUTRAL = {
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode"),
    *("task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping", "megatron_core"),
    *("qalora_group_size", "runtime_config"),
}
"""Those that change nothing of it. Others change it unless they are empty or have one of these values."""
USUAL = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}


def save_lora(folder: Path, factors: Mapping[str, Tensor], lora: Lora, convolutions: Collection[str] = ()) -> Path:
    """Write `factors` to ``folder/pytorch_lora_weights.safetensors``, atomically, and return the file.

    Keys are ``transformer.<module>.lora_A.weight`` and ``….lora_B.weight`` in float32. B is multiplied by alpha / rank,
    and alpha is the rank. Else no file would do for all readers: diffusers needs alpha in the header, its `LoraConfig`;
    ComfyUI in keys ``<module>.alpha``, which diffusers refuses for all families but FLUX.1.

    Args:
        convolutions: path endings of linears that are 1×1 convolutions in the checkpoint (`models.Family`); their
            factors get the trailing [1, 1] of a convolution's weight.
    """
    tensors = {}
    for name in sorted(factors):
        factor = factors[name].detach().cpu().contiguous() * (
            lora.alpha / lora.rank if name.endswith(".lora_B") else 1.0
        )
        module = name.rpartition(".")[0]
        is_convolution = ends_in(module, convolutions)
        tensors[f"{PREFIX}{name}.weight"] = factor[:, :, None, None] if is_convolution else factor
    adapter = {"r": lora.rank, "lora_alpha": lora.rank, "target_modules": sorted(lora.targets)}
    header = {PREFIX + name: value for name, value in adapter.items()}
    content = save(tensors, metadata={METADATA_KEY: json.dumps(header, sort_keys=True)})
    replace_file(folder / FILE, content)
    return folder / FILE


def load_lora(path: Path, lora: Lora) -> dict[str, Tensor]:
    """Read a file that `save_lora` or diffusers wrote with its metadata; `path` is the file or its folder.

    Returns the float32 factors by name in sorted order, those of 1×1 convolutions as matrices, and B multiplied so that
    with `lora` they change each weight as the file says. They stay bit for bit where its alpha / rank is the file's.

    Raises:
        UserError: the file is missing, damaged, of another rank, without adapter metadata or with metadata that changes
            its meaning in a way that a run cannot keep, or holds more than LoRA factors.
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
    adapter = _adapter(header, file)
    factors = {}
    for key in sorted(tensors):
        name = key.removeprefix(PREFIX).removesuffix(".weight")
        if f"{PREFIX}{name}.weight" != key or not name.endswith((".lora_A", ".lora_B")):
            raise UserError(f"The LoRA file {file} holds {key}, which is not a LoRA factor of a transformer.")
        tensor = tensors[key]
        module, is_b = name[: -len(".lora_B")], name.endswith(".lora_B")
        rank, found = (
            _of(module, adapter, "r", "rank_pattern"),
            tensor.shape[1 if is_b else 0] if tensor.ndim > 1 else 0,
        )
        if not found == rank == lora.rank:
            raise UserError(
                f"The LoRA file {file} says rank {rank} of {module} and holds rank {found}; model.lora.rank is "
                f"{lora.rank}."
            )
        if is_b:
            strength = _of(module, adapter, "lora_alpha", "alpha_pattern") / lora.alpha
            tensor = tensor * (strength * math.sqrt(rank) if adapter.get("use_rslora") else strength)
        factors[name] = tensor[:, :, 0, 0] if tensor.shape[2:] == (1, 1) else tensor
    return factors


def _of(module: str, adapter: Mapping[str, Any], name: str, pattern: str) -> float:
    """A module's rank or alpha: that of the first pattern that matches the end of its path, as PEFT has it."""
    patterns: Mapping[str, float] = adapter.get(pattern) or {}
    return next((patterns[end] for end in patterns if re.match(rf"(.*\.)?({end})$", module)), adapter[name])


def _adapter(header: str, file: Path) -> dict[str, Any]:
    """A LoRA file's metadata. Raises UserError if it is no transformer's adapter, or means what a run cannot keep."""
    try:
        adapter = {name.removeprefix(PREFIX): value for name, value in json.loads(header).items()}
        patterns = [adapter.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
        numbers = [adapter["r"], adapter["lora_alpha"], *patterns[0].values(), *patterns[1].values()]
        stated = all(0 < number < math.inf for number in numbers)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        stated = False
    if not stated:
        raise UserError(
            f"The header of the LoRA file {file} ({METADATA_KEY}) does not state r and lora_alpha of a transformer's "
            f"adapter: {header[:60]}"
        )
    changes = {name: value for name, value in adapter.items() if name not in READ | NEUTRAL and value}
    changes = {name: value for name, value in changes.items() if value not in USUAL.get(name, ())}
    # Paths, no other expressions: some take for ever.
    changes |= {end: "a pattern" for each in patterns for end in each if not re.fullmatch(r"\^?[\w.]+", end)}
    if changes:
        name, value = next(iter(changes.items()))
        raise UserError(
            f"The LoRA file {file} has {name} {value!r:.80} in its header, which a run cannot continue with."
        )
    return adapter
