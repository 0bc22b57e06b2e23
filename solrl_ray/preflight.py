"""What a run needs on disk, checked before anything is started: prompts, checkpoints, free space.

Also `model_facts`: the sizes that only the model's files can tell, read without loading a weight.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from torch import nn

from solrl_ray import models
from solrl_ray.config.arithmetic import Arithmetic, ModelFacts, describe
from solrl_ray.config.loading import Sources
from solrl_ray.config.schema import Config, Model
from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.prompts import read_prompts
from solrl_ray.records import Prompt

GIGABYTE = 10**9
NVFP4_BLOCK = 16
"""Values that share one E4M3 block scale."""
NVFP4_PADDING = 32
"""Columns of a packed weight are padded to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the checks read, so that nothing need be read twice."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    facts: ModelFacts


def check(config: Config, sources: Sources | None = None) -> Inputs:
    """Check everything a run reads or writes. Creates nothing, loads no weights, touches no device.

    Raises UserError: a prompt file that is missing or empty, too few prompts, held-out prompts
    among the training prompts, a checkpoint that is not there, a LoRA target that matches nothing, too little
    free space.
    """
    sources = sources or Sources()
    train, heldout = _prompts(config, sources)
    for position, reward in enumerate(config.rewards):
        if reward.path:
            paths.checkpoint(
                reward.path, f"rewards.{position}.path ({sources.of(f'rewards.{position}.path')})"
            )
    facts = model_facts(config)
    _space(config, sources)
    return Inputs(train=train, heldout=heldout, facts=facts)


def plan(config: Config, inputs: Inputs) -> Arithmetic:
    """The printed arithmetic with everything that `check` found out."""
    return describe(
        config, inputs.facts, train_prompts=len(inputs.train), heldout_prompts=len(inputs.heldout)
    )


def _prompts(config: Config, sources: Sources) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    train = tuple(read_prompts(config.prompts.train))
    heldout = tuple(read_prompts(config.prompts.heldout))
    if config.rollout.prompts > len(train):
        raise UserError(
            f"rollout.prompts is {config.rollout.prompts} ({sources.of('rollout.prompts')}); it must be at "
            f"most {len(train)}, the number of distinct prompts in prompts.train, {config.prompts.train}."
        )
    if config.evaluation.prompts > len(heldout):
        raise UserError(
            f"evaluation.prompts is {config.evaluation.prompts} ({sources.of('evaluation.prompts')}); "
            f"it must be at most {len(heldout)}, the number of distinct prompts in prompts.heldout, "
            f"{config.prompts.heldout}."
        )
    known = {prompt.id for prompt in train}
    shared = [prompt for prompt in heldout if prompt.id in known]
    if shared:
        raise UserError(
            f"prompts.heldout is {config.prompts.heldout} ({sources.of('prompts.heldout')}), and "
            f"{len(shared)} of its prompts are also in prompts.train, such as {shared[0].text!r}; "
            "an evaluation needs prompts that were never trained on."
        )
    return train, heldout


def _space(config: Config, sources: Sources) -> None:
    root = Path(config.run.root).expanduser().absolute()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir():
        raise UserError(
            f"run.root is {config.run.root} ({sources.of('run.root')}), but {existing} is a file."
        )
    free = shutil.disk_usage(existing).free / GIGABYTE
    if free < config.checkpoints.min_free_gb:
        raise UserError(
            f"run.root is {config.run.root} ({sources.of('run.root')}), whose disk has {free:.2f} GB free; "
            f"checkpoints.min_free_gb asks for at least {config.checkpoints.min_free_gb:g} GB."
        )


def model_facts(config: Config) -> ModelFacts:
    """Sizes of the model and its adapter, from the checkpoint's configuration alone.

    Raises UserError if the checkpoint is not there, or if an entry of ``model.lora.targets`` matches nothing.
    """
    skeleton = _skeleton(config.model)
    linears = [(path, module) for path, module in skeleton.named_modules() if isinstance(module, nn.Linear)]
    adapted = {path: module for path, module in linears if _is_target(path, config.model.lora.targets)}
    for target in config.model.lora.targets:
        if not any(_is_target(path, [target]) for path in adapted):
            raise UserError(
                f"model.lora.targets names {target!r}, but no linear of {config.model.path} ends with it."
            )
    rank = config.model.lora.rank
    return ModelFacts(
        latent_shape=models.load(config.model, "cpu", components=()).latent_shape,
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        lora_modules=len(adapted),
        lora_parameters=sum(rank * (m.in_features + m.out_features) for m in adapted.values()),
        packed_bytes=sum(
            packed_size(module.out_features, module.in_features)
            for path, module in adapted.items()
            if config.rollout.preview.precision in ("nvfp4", "nvfp4-emulated")
            and is_quantized(path, module, config.model)
        ),
    )


def packed_size(rows: int, columns: int) -> int:
    """Bytes of one packed NVFP4 weight: two codes a byte, one E4M3 scale a block."""
    padded = -(-columns // NVFP4_PADDING) * NVFP4_PADDING
    return rows * padded // 2 + rows * padded // NVFP4_BLOCK


def is_quantized(path: str, linear: nn.Linear, model: Model) -> bool:
    """Whether the configured scope quantises the linear at `path`."""
    scope = model.quantization
    wide = max(linear.in_features, linear.out_features) > scope.min_features
    return wide and not any(skipped in path for skipped in scope.skip)


def _is_target(path: str, targets: list[str]) -> bool:
    """PEFT's rule for a list of `target_modules`: the whole path or its end after a dot."""
    return any(path == target or path.endswith(f".{target}") for target in targets)


def _skeleton(model: Model) -> nn.Module:
    """The transformer with its shapes and no memory behind them."""
    settings = paths.read_json(
        paths.checkpoint(model.path, "model.path"), "transformer/config.json", "model.path"
    )
    transformer = getattr(diffusers, str(settings.get("_class_name")), None)
    if transformer is None:
        raise UserError(
            f"model.path is {model.path!r}, whose transformer is a {settings.get('_class_name')!r}, "
            f"which diffusers {diffusers.__version__} does not have."
        )
    with torch.device("meta"):
        skeleton = transformer.from_config(settings)
    assert isinstance(skeleton, nn.Module)
    return skeleton
