"""``solrl export``: a run's policy as a LoRA file of another tool, or merged into its checkpoint."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from solrl_ray.common.files import replace_file
from solrl_ray.config.problems import counted
from solrl_ray.errors import UserError
from solrl_ray.policy.tool_names import Tool
from solrl_ray.storage import continuation

if TYPE_CHECKING:
    from torch import Tensor

    from solrl_ray.config.schema import Model

FORMATS = ("diffusers", *get_args(Tool), "checkpoint")
POLICIES = ("ema", "default")


def export(arguments: argparse.Namespace) -> int:
    """Write a policy for other tools: of the newest checkpoint, of an earlier one, or of the best evaluation."""
    run: Path = arguments.run
    config = continuation.stored(run)
    model, key = config.model, "model.path (of the run; --base names another)"
    if arguments.base:
        model, key = model.model_copy(update={"path": arguments.base}), "--base"
    from solrl_ray.evaluation.request import state_of

    state = state_of(run, _best(run) if arguments.best else arguments.updates)
    factors: dict[str, Tensor] = getattr(state, arguments.policy)
    folder: Path = arguments.out or run / "export" / arguments.format
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out is {folder}, a file; it must be a folder.")
    what = f"{arguments.policy} after update {state.updates}"
    if arguments.format == "checkpoint":
        _whole(folder, factors, model, key)
        print(f"written: {folder}: {what}, merged into {model.path}")
    else:
        # Not `run.name`, which in somebody else's configuration may be any path.
        file = _lora_file(arguments.format, folder, run.resolve().name, factors, model, key)
        print(f"written: {file}: {what}, {_ranks(file)}")
    return 0


def _best(run: Path) -> int:
    """The updates after which the run's best evaluated policy was there."""
    from solrl_ray.report.data import read_run

    summary = read_run(run).at_best().summary
    assert summary is not None
    return summary.iterations


def _lora_file(kind: str, folder: Path, name: str, factors: Mapping[str, Tensor], model: Model, key: str) -> Path:
    """Write a LoRA file of a format into a folder, and return its path. `key`: where `model.path` was given."""
    from safetensors.torch import save

    from solrl_ray import models
    from solrl_ray.policy.saving import save_lora, tool_tensors
    from solrl_ray.storage.warm_start import network_of

    if kind == "diffusers":
        return save_lora(folder, factors, model.lora, models.FAMILIES[model.family].CONVOLUTIONS)
    file = folder / f"{name}.safetensors"
    tensors = tool_tensors("comfyui" if kind == "comfyui" else "kohya", factors, model.lora, network_of(model, key))
    replace_file(file, save(tensors, metadata={"format": "pt"}))
    return file


def _whole(folder: Path, factors: Mapping[str, Tensor], model: Model, key: str) -> None:
    """Write the checkpoint with the policy merged into its transformer, which is then of `model.dtype`."""
    from solrl_ray import models
    from solrl_ray.models import paths
    from solrl_ray.models.components import DTYPES
    from solrl_ray.policy import fusing

    if folder.exists():
        raise UserError(f"{folder} is there already; name another folder with --out, or remove it.")
    base, part = _base(model, key), {"subfolder": fusing.PART, "torch_dtype": DTYPES[model.dtype]}
    transformer = paths.load_weights(models.family(model).TRANSFORMER, base, key, **part)
    fusing.merge_(transformer, factors, model.lora, base)
    fusing.write(base, folder, transformer)


def _ranks(file: Path) -> str:
    """How many linears of the file have which rank."""
    import safetensors

    with safetensors.safe_open(file, framework="pt") as content:
        names = [key for key in content.keys() if key.endswith(("lora_A.weight", "lora_down.weight"))]  # noqa: SIM118
        counts = Counter(content.get_slice(key).get_shape()[0] for key in names)
    return ", ".join(f"rank {rank} of {counted(count, 'linear')}" for rank, count in sorted(counts.items()))


def _base(model: Model, key: str) -> Path:
    """The run's checkpoint on this disk; fetched if it is on the hub and not in its cache."""
    from solrl_ray import models
    from solrl_ray.models import paths

    source = paths.checkpoint(model.path, key)
    if isinstance(source, Path):
        return source
    try:
        return Path(models.family(model).PIPELINE.download(source, use_safetensors=True))
    except (OSError, ValueError) as error:
        raise UserError(paths.unreadable(source, "the pipeline", key, error)) from error
