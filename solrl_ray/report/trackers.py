"""Writers for TensorBoard, W&B and trackio.

All get the same scalars under the same names (`solrl_ray.metrics.scalars`), and the images of an evaluation as one
contact sheet. W&B and trackio also get the configuration without private values (`redacted`).

For W&B and trackio, a run has one id, stored in its folder. A resumed run continues the same tracked run; a new run in
a folder of the same name does not. Data that an interrupted process has sent stays, next to the repeated iterations.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from solrl_ray.common.files import read_json, replace_file
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.metrics.scalars import evaluation_scalars, iteration_scalars, pictures_name
from solrl_ray.models import paths
from solrl_ray.report.grids import contact_sheet

FILE = "trackers.json"
"""File in a run folder with the id of the run at trackers."""
UPDATES = "updates"
"""Metric for the x axis in W&B. W&B's step cannot decrease, but an evaluation may be logged after a later iteration."""
LEFT_OUT = frozenset({"url", "request", "upload", "network", "labels", "fallback_labels"})
"""Keys that are removed: addresses, requests to a judge (which may contain a secret) and names of machines."""
WORDS = frozenset({"text", "pattern"})
"""Keys of a judge's question. Their values are never paths, so they are kept as they are."""
IDS = frozenset({"path", "base", "preview_decoder", "model", "space"})
"""Keys whose values may be Hugging Face ids, which are kept whole."""
_NAMING = threading.Lock()


class TrackerWriter:
    """`actors.world.MetricsWriter` for TensorBoard, W&B or trackio."""

    def __init__(
        self, log: Callable[[dict[str, Any], int], Any], image: Callable[[Image.Image], Any], finish: Callable[[], Any]
    ) -> None:
        """
        Args:
            log: writes values by name at a step, the number of updates.
            image: converts an image to the form that the tracker takes.
            finish: ends the tracked run.
        """
        self._log, self._image, self._finish = log, image, finish

    def iteration(self, record: IterationMetrics) -> None:
        """Write the scalars of an iteration."""
        self._log(iteration_scalars(record), record.iteration)

    def evaluation(self, record: EvaluationMetrics, pictures: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
        """Write the scalars of an evaluation and, as one contact sheet, its images: float32 [3, H, W], one row per
        prompt.
        """
        values: dict[str, Any] = evaluation_scalars(record)
        if pictures:
            values[pictures_name(record)] = self._image(contact_sheet(pictures))
        self._log(values, record.iteration)

    def close(self) -> None:
        self._finish()


def tensorboard(folder: Path, *, first_iteration: int = 0) -> TrackerWriter:
    """A writer that appends to an event file in `folder`. Each call flushes the file.

    A resumed run passes `first_iteration`; TensorBoard then hides the earlier events from this step on.
    """
    from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(str(folder), purge_step=first_iteration or None)

    def add(values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                events.add_image(name, value, step, dataformats="HWC")
            else:
                events.add_scalar(name, value, step)
        events.flush()

    return TrackerWriter(add, np.asarray, events.close)


def opened(name: str, config: Config, folder: Path) -> TrackerWriter:
    """Open one of `tracking.trackers` for the run in `folder`. Blocks; raises the errors of the tracker's package."""
    return _SERVICES[name](config, folder, run_id(folder))


def run_id(folder: Path) -> str:
    """The id of the run in `folder` at trackers: eight hexadecimal digits, created by the first call.

    Raises UserError if their file is damaged.
    """
    path = folder / FILE
    with _NAMING:  # trackers are opened in parallel
        if not path.exists():
            replace_file(path, json.dumps({"id": secrets.token_hex(4)}).encode())
        stored = read_json(path, "remove it")
    if not isinstance(stored, dict) or not isinstance(stored.get("id"), str):
        raise UserError(f"{path} does not contain the id of the run; remove it to get a new id.")
    return str(stored["id"])


def redacted(config: Config) -> dict[str, Any]:
    """A configuration as JSON, for services that other people may read: how a run was trained, not where.

    The keys in `LEFT_OUT` are removed, and local paths are reduced to their last part.
    """
    public: dict[str, Any] = _public("", config.model_dump(mode="json"))
    return public


def _public(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _public(name, inner) for name, inner in value.items() if name not in LEFT_OUT}
    if isinstance(value, list):
        return [_public(key, inner) for inner in value]
    return _last_part(key, value) if isinstance(value, str) and key not in WORDS else value


def _last_part(key: str, text: str) -> str:
    """The last part of a path, also of ``path:function``; empty for a URL; any other text unchanged."""
    if "://" in text:
        return ""
    if "/" not in text or text.startswith(paths.BUILTIN):
        return text
    return text if key in IDS and isinstance(paths.resolve(text), str) else Path(text).name


def _wandb(config: Config, folder: Path, number: str) -> TrackerWriter:
    import wandb

    tracking = config.tracking
    # Send only the run's metrics and configuration: no console output, no code, no data about the machine.
    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
        x_save_requirements=False,
        init_timeout=config.fleet.deadlines.tracking,
    )
    run = wandb.init(
        project=tracking.project,
        entity=tracking.entity or None,
        id=number,
        name=config.run.name,
        resume="allow",
        config=redacted(config),
        dir=folder,
        settings=settings,
    )
    run.define_metric(UPDATES)
    run.define_metric("*", step_metric=UPDATES)
    return TrackerWriter(lambda values, step: run.log({UPDATES: step, **values}), wandb.Image, run.finish)


def _trackio(config: Config, folder: Path, number: str) -> TrackerWriter:
    import trackio

    tracking = config.tracking
    # trackio identifies a run by its name.
    run = trackio.init(
        project=tracking.project,
        name=f"{config.run.name}-{number}",
        space_id=tracking.space or None,
        private=True,
        resume="allow",
        config=redacted(config),
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    return TrackerWriter(lambda values, step: run.log(values, step=step), trackio.Image, run.finish)


_SERVICES: dict[str, Callable[[Config, Path, str], TrackerWriter]] = {"wandb": _wandb, "trackio": _trackio}
