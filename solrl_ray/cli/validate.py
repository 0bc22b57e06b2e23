"""``solrl validate``: checks a user's model on this machine's device, in one process and without Ray."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solrl_ray.cli import guidance, preflight
from solrl_ray.common.files import make_folder
from solrl_ray.common.lazy_imports import import_large
from solrl_ray.config.fleet import Worker
from solrl_ray.config.loading import LoadedConfig, load_with_sources
from solrl_ray.errors import UserError
from solrl_ray.records import SampleShape

if TYPE_CHECKING:
    from solrl_ray.validation.session import Session
    from solrl_ray.validation.steps import Step

RESOLUTION = 256
"""Default limit of the longer side, pixels: the check needs no details."""
STEP = 32
"""Pixels of which every family takes multiples."""
PROMPTS = {"train": "builtin:testbed/prompts/train.txt", "heldout": "builtin:testbed/prompts/heldout.txt"}
"""A configuration must name some; a validation reads none."""


def configuration(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration of MODEL and its options; prompts, rewards and machines are filled in.

    Raises UserError: no configuration, or an impossible resolution or number of steps.
    """
    for option, value in (("--steps", arguments.steps), ("--deadline", arguments.deadline)):
        if value <= 0:
            raise UserError(f"{option} is {value:g}; it must be above 0.")
    for folder in filter(Path.is_dir, arguments.config):
        raise UserError(
            f"{folder} is a folder; name a model's configuration, such as flux1_dev, and the folder of its "
            f"checkpoint with --set model.path={folder}."
        )
    given: dict[str, tuple[str, Any]] = {
        **{f"prompts.{name}": ("solrl validate", path) for name, path in PROMPTS.items()},
        "rewards": ("solrl validate", [{"kind": "clipscore"}]),
    }
    resolution = arguments.resolution
    if resolution is None:
        resolution = _reduced(load_with_sources(arguments.config, arguments.set, given).config.model.shapes[0])
    given["model.resolution"] = ("--resolution", resolution)
    loaded = load_with_sources(arguments.config, arguments.set, given)
    preflight.check(preflight.Run(loaded.config, loaded.sources), "configuration")
    return loaded


def _reduced(shape: SampleShape) -> int | list[int]:
    """`model.resolution` of about its proportions, with a longer side of at most `RESOLUTION`."""
    height, width = shape.height, shape.width
    if (longer := max(height, width)) > RESOLUTION:
        height, width = (max(1, round(side / longer * RESOLUTION / STEP)) * STEP for side in (height, width))
    return height if height == width else [height, width]


def run(arguments: argparse.Namespace) -> int:
    """Validate, print a line a step, write the report; 1 if a step failed."""
    loaded = configuration(arguments)
    config = loaded.config
    folder: Path = arguments.out or Path("validation") / arguments.as_typed[0].stem
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out is {folder}, a file; it must be a folder.")
    make_folder(folder)  # fails at once if it cannot be written
    import_large("solrl_ray.models.base")
    import diffusers
    import torch
    import transformers

    from actors.workers.devices import prepare
    from solrl_ray import models
    from solrl_ray.validation import report, steps
    from solrl_ray.validation.session import Session

    for library in (diffusers, transformers):  # loading bars would mix with the lines of the steps
        library.utils.logging.disable_progress_bar()
    # Fails at once for a missing checkpoint or sizes that do not fit it.
    models.family(config.model).settings(config.model, loaded.sources.named)
    guidance.check_checkpoint(config, loaded.sources)
    worker = Worker(threads=torch.get_num_threads(), num_gpus=float(torch.cuda.is_available()))
    session = Session(config, prepare(worker, deterministic=config.run.deterministic), arguments.steps)
    planned, outcomes = _steps(session), list[steps.Outcome]()
    print(f"{len(planned)} steps, of at most {arguments.deadline:g} s each", flush=True)
    print(f"{planned[0].name}: {planned[0].does} …", flush=True)
    for number, outcome in enumerate(steps.run(planned, session.device, arguments.deadline), start=1):
        outcomes.append(outcome)
        print(outcome.line, flush=True)
        for following in planned[number : number + 1]:
            print(f"{following.name}: {following.does} …", flush=True)
    file = report.write(folder, session, outcomes, ["solrl", *sys.argv[1:]])
    if failed := [outcome.step for outcome in outcomes if outcome.state not in ("ok", "lacks")]:
        print(f"did not succeed: {', '.join(failed)}; the report has the tracebacks")
    print(f"report: {file}, and {report.PICTURES_FILE} beside it; look through its paths before you send it")
    return int(bool(failed))


def _steps(session: Session) -> list[Step]:
    from solrl_ray.quantization.capability import QUANTIZED_TIERS
    from solrl_ray.validation import against_stock, climb, roles
    from solrl_ray.validation.steps import Step

    def of(name: str, does: str, work: Any, *needs: str) -> Step:
        return Step(name, does, partial(work, session), needs)

    compared = ("text", "stock", "load")
    previews = [
        of(f"preview {tier}", f"quantise, attest, preview in {tier}", partial(roles.preview, tier=tier), "regenerate")
        for tier in QUANTIZED_TIERS
    ]
    return [
        of("text", "encode prompts", against_stock.text),
        of("stock", "draw a picture with the stock diffusers pipeline", against_stock.stock_picture),
        of("load", "load transformer and decoder", against_stock.load),
        of("forward", "velocities beside the stock pipeline's", against_stock.forward, *compared),
        of("picture", "a picture beside the stock pipeline's", against_stock.picture, *compared),
        of("regenerate", "sample chosen seeds twice, preview in full precision", roles.regenerate, "text", "load"),
        *previews,
        of("update", "one update of the policy", roles.update, "regenerate"),
        of("revision", "publish, swap, prove", roles.revision, "update"),
        of("climb", "a few updates on the pictures' brightness: does it rise?", climb.climb, "update"),
    ]
