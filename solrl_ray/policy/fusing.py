"""A diffusers checkpoint with a policy merged into its transformer: a folder that ``from_pretrained`` loads alone."""

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
"""Ends of files that are not copied: the transformer's weights, and beside the parts the whole model once more."""


def merge_(transformer: nn.Module, factors: Mapping[str, Tensor], lora: Lora, base: Path | str) -> None:
    """Add alpha / rank · B A to the weights of the stock transformer, as `merge.merged_weight` does.

    So they get the bits of a regenerator with this policy. `fuse_lora` of diffusers rounds twice: in bfloat16, 30 % of
    the merged weights differ in their last bit.

    Args:
        factors: of `policy.adapters`, by name.
        base: the checkpoint, for an error.

    Raises UserError: the transformer lacks a weight that the policy changes, or has it in another shape.
    """
    modules = dict(transformer.named_modules())
    for linear in sorted({name.rpartition(".")[0] for name in factors}):
        a, b = factors[f"{linear}.lora_A"], factors[f"{linear}.lora_B"]
        weight = getattr(modules.get(linear), "weight", None)
        found = None if weight is None else tuple(weight.shape)
        wanted = (len(b), a.shape[1])
        if weight is None or found not in (wanted, (*wanted, 1, 1)):  # of a linear, or a 1×1 convolution
            raise UserError(
                f"{base} has {linear}.weight {found or 'not at all'}, but the policy is for {wanted}; it goes with "
                "another checkpoint."
            )
        merged = merged_weight(weight.detach().flatten(1), a, b, lora.scaling)
        modules[linear].weight = nn.Parameter(merged.view(found), requires_grad=False)


def write(base: Path, folder: Path, transformer: Any) -> None:
    """Write a copy of the checkpoint `base` with another transformer into the new `folder`.

    Raises RunError if a file cannot be copied or written.
    """
    make_folder(folder.parent)
    partial = folder.with_name(f".{folder.name}.partial")
    remove(partial)

    def left_out(place: str, names: list[str]) -> list[str]:
        path = Path(place)
        hidden = [name for name in names if path == base and name.startswith(".")]
        return hidden + [name for name in names if path in (base, base / PART) and name.endswith(WEIGHTS)]

    try:
        transformer.save_pretrained(partial / PART)
        # Second: the config.json that was saved names the base's folder.
        shutil.copytree(base, partial, ignore=left_out, dirs_exist_ok=True)
        partial.rename(folder)
    except (shutil.Error, SafetensorError) as error:
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # of the first file
        raise RunError(f"{folder} cannot be written: {reason}") from error
    finally:
        remove(partial)
    sync_folder(folder.parent)
