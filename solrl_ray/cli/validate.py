"""``solrl validate``: compares a model on this machine's device with the stock pipeline, in one process without Ray."""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solrl_ray.cli import guidance, preflight
from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import make_folder, replace_file
from solrl_ray.common.lazy_imports import import_large
from solrl_ray.config.fleet import WorkerResources
from solrl_ray.config.loading import LoadedConfig, load_with_sources
from solrl_ray.errors import UserError
from solrl_ray.records import SampleShape

if TYPE_CHECKING:
    from solrl_ray.validation.against_stock import Measure, Session

RESOLUTION = 256
"""Default maximum of the longer side, pixels: the comparison needs no details."""
STEP = 32
"""Side lengths that are multiples of this many pixels are valid for every family."""
PROMPTS = {"train": "builtin:testbed/prompts/train.txt", "heldout": "builtin:testbed/prompts/heldout.txt"}
"""Placeholders for the required prompt files; a validation does not read them."""
FILE = "validation.json"
STEPS = {
    "text": "encode prompts",
    "stock_picture": "generate an image with the stock diffusers pipeline",
    "load": "load transformer and decoder",
    "forward": "compare velocities with the stock pipeline's",
    "picture": "compare an image with the stock pipeline's",
}
"""Function of `solrl_ray.validation.against_stock` → description, in order of execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step: str
    ok: bool
    seconds: float
    peak_gb: float | None
    """Peak GPU memory, GB (10^9 bytes); None without a GPU."""
    measures: list[Measure]
    reason: str
    """Reason for the failure, in one sentence; empty if the step is ok."""
    traceback: str

    @property
    def line(self) -> str:
        """One line for the terminal."""
        spent = f"{self.seconds:.1f} s" + ("" if self.peak_gb is None else f", {self.peak_gb:.2f} GB")
        detail = self.reason or "; ".join(f"{item.name} {item.shown}" for item in self.measures if item.limit)
        return f"{self.step:<14} {'ok' if self.ok else 'FAILS':<6} {spent:<20} {detail}".rstrip()


def configuration(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration of CONFIG and the options; prompts and rewards are filled in, the resolution is reduced.

    Raises UserError: No valid configuration, or an impossible resolution, number of steps or deadline.
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
    first = load_with_sources(arguments.config, arguments.set, given).config.model.shapes[0]
    given["model.resolution"] = ("solrl validate", _reduced(first))  # --set wins
    loaded = load_with_sources(arguments.config, arguments.set, given)
    preflight.check(preflight.Run(loaded.config, loaded.sources), "configuration")
    return loaded


def _reduced(shape: SampleShape) -> int | list[int]:
    """A `model.resolution` with about the same aspect ratio and a longer side of at most `RESOLUTION`."""
    height, width = shape.height, shape.width
    if (longer := max(height, width)) > RESOLUTION:
        height, width = (max(1, round(side / longer * RESOLUTION / STEP)) * STEP for side in (height, width))
    return height if height == width else [height, width]


def run(arguments: argparse.Namespace) -> int:
    """Validate, print one line per step and write the report. Returns 1 if a step failed."""
    loaded = configuration(arguments)
    config = loaded.config
    folder: Path = arguments.out or Path("validation") / arguments.as_typed[0].stem
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out is {folder}, a file; it must be a folder.")
    make_folder(folder)  # fails early if it is not writable
    import_large("solrl_ray.models.base")
    import diffusers
    import torch
    import transformers

    from actors.workers.devices import prepare
    from solrl_ray import models
    from solrl_ray.validation.against_stock import Session

    for library in (diffusers, transformers):  # progress bars would mix with the lines of the steps
        library.utils.logging.disable_progress_bar()
    # Fails early for a missing checkpoint or sizes that do not fit it.
    models.family(config.model).settings(config.model, loaded.sources.named)
    guidance.check_checkpoint(config, loaded.sources)
    worker = WorkerResources(threads=torch.get_num_threads(), num_gpus=float(torch.cuda.is_available()))
    session = Session(config, prepare(worker, deterministic=config.run.deterministic), arguments.steps)
    results = []
    for result in steps(session, arguments.deadline):
        results.append(result)
        print(result.line, flush=True)
    _write(folder, session, results)
    print(
        f"report: {folder / FILE}, and pictures.png if an image was generated; check the paths in it before you send it"
    )
    return int(not _passed(results))


def steps(session: Session, seconds: float) -> Iterator[StepResult]:
    """Yield the result of each step as soon as it is known. A step that raises or exceeds its deadline is the last."""
    import torch

    from solrl_ray.validation import against_stock

    on_gpu = session.device.type == "cuda"
    for name, description in STEPS.items():
        print(f"{name}: {description} …", flush=True)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(session.device)

        def work(name: str = name) -> list[Measure]:
            results: list[Measure] = getattr(against_stock, name)(session)
            if on_gpu:
                torch.cuda.synchronize(session.device)  # otherwise its errors would appear in the next step
            return results

        measures, reason, trace, started = list["Measure"](), "", "", time.perf_counter()
        try:
            measures = in_time(work, what=name, seconds=seconds, silent="it")
            reason = "; ".join(f"{item.name} is {item.shown}, not {item.limit}" for item in measures if not item.holds)
        except Exception as error:  # any error of a library: the report shows it
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
            trace = "".join(traceback.format_exception(error))
        yield StepResult(
            step=name,
            ok=not reason,
            seconds=time.perf_counter() - started,
            peak_gb=torch.cuda.max_memory_allocated(session.device) / 1e9 if on_gpu else None,
            measures=measures,
            reason=reason,
            traceback=trace,
        )
        if trace:
            return


def _passed(results: list[StepResult]) -> bool:
    return len(results) == len(STEPS) and all(result.ok for result in results)


def _write(folder: Path, session: Session, results: list[StepResult]) -> None:
    """Write ``validation.json`` and ``pictures.png``."""
    from solrl_ray.quantization import attestation
    from solrl_ray.report.grids import contact_sheet, encode_png
    from solrl_ray.report.summary import package_versions

    content = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": shlex.join(["solrl", *sys.argv[1:]]),
        "device": attestation.device_name(session.device),
        "versions": {"python": sys.version.split()[0], **package_versions()},
        "ok": _passed(results),
        "steps": [asdict(result) for result in results],
        "rows of pictures.png": list(session.pictures),
        "model": session.config.model.model_dump(mode="json"),
    }
    replace_file(folder / FILE, (json.dumps(content, indent=2) + "\n").encode())
    if session.pictures:
        rows = [[image.nan_to_num() for image in images] for images in session.pictures.values()]
        replace_file(folder / "pictures.png", encode_png(contact_sheet(rows)))
