"""``solrl export``: writes a run's policy as a LoRA file for another tool, or merged into the base checkpoint."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from solrl_ray.common.files import read_regular, replace_file
from solrl_ray.config.problems import counted
from solrl_ray.errors import UserError
from solrl_ray.policy.tool_names import Tool
from solrl_ray.storage import continuation

if TYPE_CHECKING:
    from torch import Tensor

    from solrl_ray.config.schema import Model
    from solrl_ray.learning.state import LearnerState

FORMATS = ("diffusers", *get_args(Tool), "checkpoint")
POLICIES = ("ema", "default")


READERS = {
    "diffusers": "diffusers (pipe.load_lora_weights)",
    "comfyui": "ComfyUI",
    "kohya": "kohya's sd-scripts and musubi-tuner; other tools may skip some of its layers without an error",
    "checkpoint": "diffusers (from_pretrained)",
}
"""Format → the tools that read it."""


def export(arguments: argparse.Namespace) -> int:
    """Write the policy of the newest checkpoint, of an earlier checkpoint or of the best evaluation for other tools."""
    run: Path = arguments.run
    config = continuation.stored(run)
    model, key = config.model, "model.path (of the run; --base names another)"
    if arguments.base:
        model, key = model.model_copy(update={"path": arguments.base}), "--base"
    kind, out = arguments.format, arguments.out or run / "export" / arguments.format
    is_file = out.suffix == ".safetensors"
    if is_file and kind == "checkpoint":
        raise UserError(f"--out is {out}, a file, but a checkpoint is a folder; set --out to a folder.")
    if out.exists() and out.is_dir() == is_file:
        what, right = ("a folder", "a new file") if is_file else ("a file", "a folder, or a file.safetensors")
        raise UserError(f"--out is {out}, {what}; it must be {right}.")
    state = _state(run, _best(run) if arguments.best else arguments.updates)
    factors: dict[str, Tensor] = getattr(state, arguments.policy)
    what = f"{arguments.policy} after update {state.updates}"
    if kind == "checkpoint":
        _whole(out, factors, model, key)
        print(f"written: {out}: {what}, merged into {model.path}")
    else:
        from solrl_ray.policy.saving import FILE

        # Not `run.name`, which may be any path in a configuration from another user.
        name = run.resolve().name
        content = _lora(kind, out.stem if is_file else name, what, factors, model, key)
        file = out if is_file else out / (FILE if kind == "diffusers" else f"{name}.safetensors")
        if file.exists() and not arguments.force and read_regular(file, math.inf) != content:
            raise UserError(f"{file} already exists with other content; choose another --out, or add --force.")
        replace_file(file, content)
        print(f"written: {file}: {what}, {_ranks(file)}")
    print(f"for:     {READERS[kind]}")
    return 0


def _state(run: Path, updates: int | None) -> LearnerState:
    """The state of a run after `updates` updates, or its newest state.

    Raises UserError if the newest checkpoint is damaged. An older policy is exported only on explicit request.
    """
    from solrl_ray.evaluation.request import state_of
    from solrl_ray.storage.checkpoints import newest_state
    from solrl_ray.storage.run_folder import RunFolder

    checkpoints = RunFolder(run).checkpoints()
    older, _, notes = (0, None, ()) if updates is not None else newest_state(checkpoints, run)
    if notes:
        raise UserError(
            f"The newest checkpoint of {run}, after {checkpoints[-1][0]} updates, is damaged ({notes[0]}); use "
            f"--updates {older} to export the newest readable checkpoint."
        )
    return state_of(run, updates)


def _best(run: Path) -> int:
    """Number of updates of the run's best evaluated policy."""
    from solrl_ray.report.data import read_run

    summary = read_run(run).at_best().summary
    assert summary is not None
    return summary.iterations


def _lora(kind: str, title: str, what: str, factors: Mapping[str, Tensor], model: Model, key: str) -> bytes:
    """The content of a LoRA file in a format. `key`: source of `model.path`, for messages."""
    from solrl_ray import models
    from solrl_ray.common.safetensors_file import written
    from solrl_ray.policy.saving import shown_metadata, stock_lora, tool_tensors
    from solrl_ray.storage.warm_start import network_of

    metadata = shown_metadata(kind, title, what, model)
    if kind == "diffusers":
        return stock_lora(factors, model.lora, models.FAMILIES[model.family].CONVOLUTIONS, metadata)
    tool: Tool = "comfyui" if kind == "comfyui" else "kohya"
    tensors = tool_tensors(tool, factors, model.lora, network_of(model, key))
    return written(tensors, {"format": "pt", **metadata})


def _whole(folder: Path, factors: Mapping[str, Tensor], model: Model, key: str) -> None:
    """Write the checkpoint with the policy merged into its transformer, in the data type `model.dtype`."""
    from solrl_ray import models
    from solrl_ray.models import paths
    from solrl_ray.models.components import DTYPES
    from solrl_ray.policy import fusing

    if folder.exists():
        raise UserError(f"{folder} already exists; name another folder with --out, or remove it.")
    base, part = _base(model, key), {"subfolder": fusing.PART, "torch_dtype": DTYPES[model.dtype]}
    transformer = paths.load_weights(models.family(model).TRANSFORMER, base, key, **part)
    fusing.merge_(transformer, factors, model.lora, base)
    fusing.write(base, folder, transformer)


def _ranks(file: Path) -> str:
    """Ranks of the file's layers in words: ``rank 32 of 120 linears``."""
    import safetensors

    with safetensors.safe_open(file, framework="pt") as content:
        names = [key for key in content.keys() if key.endswith(("lora_A.weight", "lora_down.weight"))]  # noqa: SIM118
        counts = Counter(content.get_slice(key).get_shape()[0] for key in names)
    return ", ".join(f"rank {rank} of {counted(count, 'linear')}" for rank, count in sorted(counts.items()))


def _base(model: Model, key: str) -> Path:
    """Local folder of the base checkpoint; downloaded if it is on the hub and not in the hub's cache."""
    from solrl_ray import models
    from solrl_ray.models import paths

    source = paths.checkpoint(model.path, key)
    if isinstance(source, Path):
        return source
    try:
        return Path(models.family(model).PIPELINE.download(source, use_safetensors=True))
    except (OSError, ValueError) as error:
        raise UserError(paths.unreadable(source, "the pipeline", key, error)) from error
