"""A run's first policy if it is not the base: from another run, a checkpoint, or a LoRA file.

    run.init ──► factors (default, old, EMA), moments 0 ──► checkpoint of 0 updates in the new run's own folder

Resuming reads that checkpoint and never `run.init` again.
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
        The configuration with `run.init_digest`, and the state of 0 updates that the run begins with. A run gives its
        three policies; a LoRA file is used for all three.

    Raises UserError: it is no run, checkpoint or LoRA file, is damaged, of another rank or base, a run of another
    alpha, or its digest is not `run.init_digest`.
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
        problem = f"a folder of another kind, with no {FILE} or {PEFT_FILE}" if path.exists() else "which is not there"
        raise UserError(f"{named}, {problem}; it must be a run folder, a checkpoint of one, or a LoRA file.")
    mean, square = zeros_like(state.default), zeros_like(state.default)
    state = replace(state, updates=0, steps=0, rollbacks=0, exp_avg=mean, exp_avg_sq=square)
    try:
        state.check_fits(factor_shapes(config))
    except UserError as error:
        raise UserError(f"{named}, a LoRA of another base or other targets: {error}") from error
    digest = lora_digest(state.default)
    if config.run.init_digest not in ("", digest):
        raise UserError(f"{named}, whose digest is {digest}, but run.init_digest is {config.run.init_digest}.")
    return config.changed({"run.init_digest": digest}), state


def network_of(model: Model, key: str = "model.path") -> Network:
    """The configured transformer; reads no weight. `key`: where `model.path` was given."""
    family = models.family(model)
    modules = family.skeleton(model, key).named_modules()
    rows = {path: module.out_features for path, module in modules if isinstance(module, nn.Linear)}
    return Network(family.TRANSFORMER.__name__, rows, models.FAMILIES[model.family].TOOL_NAMES)


def factor_shapes(config: Config) -> dict[str, torch.Size]:
    """Shapes of the configured model's LoRA factors, by name; reads no weight."""
    skeleton = models.family(config.model).skeleton(config.model, "model.path")
    shapes = {}
    for path, linear in touched_linears(skeleton, config.model.lora.targets).items():
        shapes[f"{path}.lora_A"] = torch.Size((config.model.lora.rank, linear.in_features))
        shapes[f"{path}.lora_B"] = torch.Size((linear.out_features, config.model.lora.rank))
    return shapes


def _newest(run: Path, named: str) -> LearnerState:
    state = newest_told(RunFolder(run).checkpoints(), run)
    if state is None:
        raise UserError(f"{named}, a run that has no checkpoint yet.")
    return state


def _check_base(found: Model, wanted: Model, named: str) -> None:
    """Only a run records its base; a LoRA file does not."""
    if (found.family, found.path) != (wanted.family, wanted.path):
        raise UserError(
            f"{named}, a run on {found.family} {found.path!r}, but this one is on {wanted.family} {wanted.path!r}: "
            "a LoRA goes with the base that it was trained on."
        )


def _check_targets(factors: Tensors, lora: Lora, network: Network, named: str) -> None:
    """Refuse a file of other linears than the targets, with those that are its own if there are such."""
    linears = {name.rpartition(".")[0] for name in factors}
    other = linears ^ {path for path in network.rows if ends_in(path, lora.targets)}
    if not other:
        return
    ends = sorted({re.sub(r"^.*?\.\d+\.", "", path) for path in linears})
    fits = linears == {path for path in network.rows if ends_in(path, ends)}
    fitting = f"; it has those of model.lora.targets=[{', '.join(ends)}]" if fits else ""
    raise UserError(f"{named}, a LoRA of other linears than model.lora.targets names, such as {min(other)}{fitting}.")


def _check_lora(found: Lora, wanted: Lora, named: str) -> None:
    if (found.rank, found.alpha) != (wanted.rank, wanted.alpha):
        raise UserError(
            f"{named}, a LoRA of rank {found.rank} and alpha {found.alpha:g}; model.lora must have the same, it has "
            f"rank {wanted.rank} and alpha {wanted.alpha:g}."
        )
