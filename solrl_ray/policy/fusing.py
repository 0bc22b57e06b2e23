"""Writes a diffusers checkpoint with a policy merged into its transformer, which ``from_pretrained`` loads as it is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from solrl_ray.common.files import make_folder, remove, sync_folder
from solrl_ray.config.schema import Lora
from solrl_ray.errors import RunError, UserError
from solrl_ray.policy.merge import merged_weight

PART = "transformer"
WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".gguf", ".msgpack", ".onnx", ".index.json")
"""File endings that are not copied: the transformer's weights, and single-file copies of the whole model."""


def merge_(transformer: nn.Module, factors: Mapping[str, Tensor], lora: Lora, base: Path | str) -> None:
    """Add alpha / rank · B A to the weights of the stock transformer, in place, with `merge.merged_weight`.

    So the weights get the same bits as in a regenerator with this policy. `fuse_lora` of diffusers rounds twice: in
    bfloat16, 30 % of the merged weights then differ in their last bit.

    Args:
        factors: LoRA factors by name, as in `policy.adapters`.
        base: the checkpoint, for the error message.

    Raises UserError if the transformer lacks a weight that the policy changes, or has it in another shape.
    """
    modules = dict(transformer.named_modules())
    for linear in sorted({name.rpartition(".")[0] for name in factors}):
        a, b = factors[f"{linear}.lora_A"], factors[f"{linear}.lora_B"]
        weight = getattr(modules.get(linear), "weight", None)
        shape = None if weight is None else tuple(weight.shape)
        wanted = (len(b), a.shape[1])
        if weight is None or shape not in (wanted, (*wanted, 1, 1)):  # of a linear, or a 1×1 convolution
            actual = f"has {linear}.weight of shape {shape}" if shape else f"has no {linear}.weight"
            raise UserError(
                f"{base} {actual}, but the policy changes a weight of shape {wanted}. Give the checkpoint that the "
                "policy was trained on."
            )
        merged = merged_weight(weight.detach().flatten(1), a, b, lora.scaling)
        modules[linear].weight = nn.Parameter(merged.view(shape), requires_grad=False)


def write(base: Path, folder: Path, transformer: Any) -> None:
    """Write a copy of the checkpoint `base` with another `transformer` to the new `folder`.

    Raises RunError if a file cannot be copied or written.
    """
    make_folder(folder.parent)
    partial = folder.with_name(f".{folder.name}.partial")
    remove(partial)

    def ignored(directory: str, names: list[str]) -> list[str]:
        path = Path(directory)
        hidden = [name for name in names if path == base and name.startswith(".")]
        return hidden + [name for name in names if path in (base, base / PART) and name.endswith(WEIGHTS)]

    try:
        transformer.save_pretrained(partial / PART)
        # After saving, to replace the saved config.json, which contains the path of the base's folder.
        shutil.copytree(base, partial, ignore=ignored, dirs_exist_ok=True)
        partial.rename(folder)
    except (shutil.Error, SafetensorError) as error:
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # reason of the first file
        raise RunError(f"{folder} cannot be written: {reason}") from error
    finally:
        remove(partial)
    sync_folder(folder.parent)
