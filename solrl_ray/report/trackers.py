"""TensorBoard, W&B and trackio get the same data and names (`solrl_ray.metrics.scalars`), pictures as one sheet; of a
configuration only what others may read (`redacted`).

For W&B and trackio a run has one id, kept in its folder. A resumed run continues the same tracked run; a new run in a
folder of the same name does not. Data that an interrupted process sent there stays, beside the repeated iterations.
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
"""File of a run folder with the run's id for trackers."""
UPDATES = "updates"
"""The x axis of W&B's curves. Its own step only rises, and an evaluation may come after the next iteration."""
LEFT_OUT = frozenset({"url", "request", "upload", "network", "labels", "fallback_labels"})
"""Keys of addresses, of requests to a judge, which may hold a secret, and of names of machines."""
WORDS = frozenset({"text", "pattern"})
"""Keys of a judge's question, whose values are never paths."""
IDS = frozenset({"path", "base", "preview_decoder", "model", "space"})
"""Keys whose values may be Hugging Face ids."""
_NAMING = threading.Lock()


class TrackerWriter:
    """`actors.world.MetricsWriter` for a service, or for TensorBoard."""

    def __init__(
        self, log: Callable[[dict[str, Any], int], Any], image: Callable[[Image.Image], Any], finish: Callable[[], Any]
    ) -> None:
        """
        Args:
            log: takes values by name, and how many updates were done.
            image: the service's own form of a picture.
        """
        self._log, self._image, self._finish = log, image, finish

    def iteration(self, record: IterationMetrics) -> None:
        self._log(iteration_scalars(record), record.iteration)

    def evaluation(self, record: EvaluationMetrics, pictures: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
        """Its scalars and, as one image, its pictures: float32 [3, H, W], a row a prompt."""
        values: dict[str, Any] = evaluation_scalars(record)
        if pictures:
            values[pictures_name(record)] = self._image(contact_sheet(pictures))
        self._log(values, record.iteration)

    def close(self) -> None:
        self._finish()


def tensorboard(folder: Path, *, first_iteration: int = 0) -> TrackerWriter:
    """Appends to one event file in `folder`; everything written is in the file on return.

    A resumed run passes `first_iteration`: TensorBoard then drops the interrupted process's events from there on.
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
    """One of `tracking.trackers` for the run in `folder`. Blocks; raises what the tracker's package raises."""
    return _SERVICES[name](config, folder, run_id(folder))


def run_id(folder: Path) -> str:
    """Eight hexadecimal digits that identify the run in `folder` to trackers; the first caller makes them.

    Raises UserError if their file is damaged.
    """
    path = folder / FILE
    with _NAMING:  # trackers are opened in parallel
        if not path.exists():
            replace_file(path, json.dumps({"id": secrets.token_hex(4)}).encode())
        found = read_json(path, "remove it")
    if not isinstance(found, dict) or not isinstance(found.get("id"), str):
        raise UserError(f"{path} does not say under which id the run is tracked; remove it.")
    return str(found["id"])


def redacted(config: Config) -> dict[str, Any]:
    """A configuration for services that others may read, as JSON: it says how a run was trained, not where. Without
    `LEFT_OUT`; local paths are reduced to their last part.
    """
    shown: dict[str, Any] = _shown("", config.model_dump(mode="json"))
    return shown


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shown(name, inner) for name, inner in value.items() if name not in LEFT_OUT}
    if isinstance(value, list):
        return [_shown(key, inner) for inner in value]
    return _last_part(key, value) if isinstance(value, str) and key not in WORDS else value


def _last_part(key: str, text: str) -> str:
    """The last part of a path, or of a function in a file; empty for an address; any other text unchanged."""
    if "://" in text:
        return ""
    if "/" not in text or text.startswith(paths.BUILTIN):
        return text
    return text if key in IDS and isinstance(paths.resolve(text), str) else Path(text).name


def _wandb(config: Config, folder: Path, number: str) -> TrackerWriter:
    import wandb

    tracking = config.tracking
    # Send only what the run sends itself: no console, no code, no machine.
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
    # It identifies a run by its name.
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
