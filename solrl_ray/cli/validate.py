"""``solrl validate``: checks a user's model on this machine's device, in one process and without Ray."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from solrl_ray.common.files import make_folder
from solrl_ray.common.lazy_imports import import_large
from solrl_ray.config import checks
from solrl_ray.config.fleet import Worker
from solrl_ray.config.loading import LoadedConfig, load_with_sources
from solrl_ray.errors import UserError

RESOLUTION = 256
"""Default limit, pixels: the check needs no details."""
PROMPTS = {"train": "builtin:testbed/prompts/train.txt", "heldout": "builtin:testbed/prompts/heldout.txt"}
"""A configuration must name some; a validation reads none."""


def configuration(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration of MODEL and its options; prompts, rewards and machines are filled in.

    Raises UserError: no configuration, or an impossible resolution or number of steps.
    """
    for option, value in (("--steps", arguments.steps), ("--deadline", arguments.deadline)):
        if value <= 0:
            raise UserError(f"{option} is {value:g}; it must be above 0.")
    folders = [path for path in arguments.config if path.is_dir()]
    if folders:
        raise UserError(
            f"{folders[0]} is a folder; name a model's configuration, such as flux1_dev, and the folder of its "
            f"checkpoint with --set model.path={folders[0]}."
        )
    given: dict[str, tuple[str, Any]] = {
        **{f"prompts.{name}": ("solrl validate", path) for name, path in PROMPTS.items()},
        "rewards": ("solrl validate", [{"kind": "clipscore"}]),
    }
    if arguments.resolution is not None:
        given["model.resolution"] = ("--resolution", arguments.resolution)
    loaded = load_with_sources(arguments.config, arguments.set, given)
    if arguments.resolution is None and loaded.config.model.resolution > RESOLUTION:
        given["model.resolution"] = ("solrl validate, --resolution", RESOLUTION)
        loaded = load_with_sources(arguments.config, arguments.set, given)
    checks.check(loaded.config, loaded.sources)
    return loaded


def run(arguments: argparse.Namespace) -> int:
    """Validate, print a line a step, write the report; 1 if a step failed."""
    config = configuration(arguments).config
    folder: Path = arguments.out or Path("validation") / arguments.as_typed[0].stem
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out is {folder}, a file; it must be a folder.")
    make_folder(folder)  # fails at once if it cannot be written
    import_large("solrl_ray.models.base")
    import torch

    from actors.workers.devices import prepare
    from solrl_ray import models
    from solrl_ray.validation.validate import validate

    _no_progress_bars()
    # Fails at once for a missing checkpoint or sizes that do not fit it.
    models.family(config.model).settings(config.model)
    worker = Worker(threads=torch.get_num_threads(), num_gpus=float(torch.cuda.is_available()))
    device = prepare(worker, deterministic=config.run.deterministic)
    outcomes, page = validate(
        config,
        device,
        folder,
        solver_steps=arguments.steps,
        seconds=arguments.deadline,
        command=["solrl", *sys.argv[1:]],
        tell=lambda line: print(line, flush=True),
    )
    failed = [outcome.step for outcome in outcomes if outcome.state not in ("ok", "lacks")]
    if failed:
        print(f"did not succeed: {', '.join(failed)}; the report has the tracebacks")
    print(
        f"report: {page}, and {page.with_suffix('.json').name} beside it; look through their paths before you send them"
    )
    return int(bool(failed))


def _no_progress_bars() -> None:
    """Loading bars would mix with the lines of the steps."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
