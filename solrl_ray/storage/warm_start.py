"""Warm start: the first policy of a run, taken from another run, a checkpoint or a LoRA file.

    run.init ──► factors (default, old, EMA), moments 0 ──► checkpoint of 0 updates in the new run's folder

A resumed run reads that checkpoint and never reads `run.init` again.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from solrl_ray import models
from solrl_ray.common.files import located
from solrl_ray.common.module_paths import ends_in
from solrl_ray.config.loading import Sources
from solrl_ray.config.schema import Config, Lora, Model
from solrl_ray.errors import UserError
from solrl_ray.learning.state import LearnerState, Tensors, zeros_like
from solrl_ray.policy.digest import lora_digest
from solrl_ray.policy.reading import PEFT_FILE, load_lora, lora_file
from solrl_ray.policy.saving import FILE
from solrl_ray.policy.tool_names import Network
from solrl_ray.storage import continuation
from solrl_ray.storage.checkpoints import newest_told
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.weight_sync.publish import touched_linears


def warm_start(config: Config, sources: Sources | None = None) -> tuple[Config, LearnerState]:
    """Read `run.init`.

    Returns:
        The configuration with `run.init_digest` set, and the initial state (0 updates). A run or checkpoint provides
        all three policies; a LoRA file is used for all three.

    Raises UserError if `run.init` is not a run, checkpoint or LoRA file, is damaged, has another rank, base or (for a
    run) alpha, or if its digest differs from `run.init_digest`.
    """
    init = config.run.init
    named = f"run.init is {init!r} ({(sources or Sources()).of('run.init')})"
    path = located(init, "run.init")
    source = continuation.origin(path)
    if source is not None:
        trained = continuation.stored(source).model
        _check_base(trained, config.model, named)
        _check_lora(trained.lora, config.model.lora, named)
        state = LearnerState.load(path) if path != source else _newest(source, named)
    elif file := lora_file(path):
        network = network_of(config.model)
        factors = load_lora(file, config.model.lora, network)
        _check_targets(factors, config.model.lora, network, named)
        state = LearnerState.first(factors)
    else:
        problem = f"which has no {FILE} or {PEFT_FILE}" if path.exists() else "which does not exist"
        raise UserError(f"{named}, {problem}; it must be a run folder, a checkpoint of a run, or a LoRA file.")
    mean, square = zeros_like(state.default), zeros_like(state.default)
    state = replace(state, updates=0, steps=0, rollbacks=0, exp_avg=mean, exp_avg_sq=square)
    try:
        state.check_fits(factor_shapes(config))
    except UserError as error:
        raise UserError(f"{named}, a LoRA for another base model or other targets: {error}") from error
    digest = lora_digest(state.default)
    if config.run.init_digest not in ("", digest):
        raise UserError(f"{named}, whose digest is {digest}, but run.init_digest is {config.run.init_digest}.")
    return config.changed({"run.init_digest": digest}), state


def network_of(model: Model, key: str = "model.path") -> Network:
    """Names and output sizes of the linears of the configured transformer, without reading weights.

    `key`: configuration key to name in errors.
    """
    family = models.family(model)
    modules = family.skeleton(model, key).named_modules()
    rows = {path: module.out_features for path, module in modules if isinstance(module, nn.Linear)}
    return Network(family.TRANSFORMER.__name__, rows, models.FAMILIES[model.family].TOOL_NAMES)


def factor_shapes(config: Config) -> dict[str, torch.Size]:
    """Name → shape of the LoRA factors of the configured model, without reading weights."""
    skeleton = models.family(config.model).skeleton(config.model, "model.path")
    shapes = {}
    for path, linear in touched_linears(skeleton, config.model.lora.targets).items():
        shapes[f"{path}.lora_A"] = torch.Size((config.model.lora.rank, linear.in_features))
        shapes[f"{path}.lora_B"] = torch.Size((linear.out_features, config.model.lora.rank))
    return shapes


def _newest(run: Path, named: str) -> LearnerState:
    state = newest_told(RunFolder(run).checkpoints(), run)
    if state is None:
        raise UserError(f"{named}, a run that has no checkpoint yet; wait for its first update.")
    return state


def _check_base(source: Model, wanted: Model, named: str) -> None:
    """Check the base model of a run. (A LoRA file does not record its base model.)"""
    if (source.family, source.path) != (wanted.family, wanted.path):
        raise UserError(
            f"{named}, a run on {source.family} {source.path!r}, but this run is on {wanted.family} {wanted.path!r}. "
            "A LoRA only works with the base model that it was trained on."
        )


def _check_targets(factors: Tensors, lora: Lora, network: Network, named: str) -> None:
    """Check that a LoRA file has the linears that the targets name. The error suggests fitting targets if any exist."""
    linears = {name.rpartition(".")[0] for name in factors}
    differing = linears ^ {path for path in network.rows if ends_in(path, lora.targets)}
    if not differing:
        return
    ends = sorted({re.sub(r"^.*?\.\d+\.", "", path) for path in linears})
    fits = linears == {path for path in network.rows if ends_in(path, ends)}
    fitting = f"; it has those of model.lora.targets=[{', '.join(ends)}]" if fits else ""
    raise UserError(f"{named}, a LoRA of other linears than model.lora.targets, such as {min(differing)}{fitting}.")


def _check_lora(source: Lora, wanted: Lora, named: str) -> None:
    """Check that a run has the configured rank and alpha."""
    if (source.rank, source.alpha) != (wanted.rank, wanted.alpha):
        raise UserError(
            f"{named}, a LoRA of rank {source.rank} and alpha {source.alpha:g}, but model.lora sets rank {wanted.rank} "
            f"and alpha {wanted.alpha:g}; use the values of the LoRA."
        )
