"""Writes TensorBoard events: a run's scalars, and its pictures as one sheet. Names and steps are those of
`solrl_ray.metrics.scalars`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.metrics.scalars import evaluation_scalars, iteration_scalars, pictures_name
from solrl_ray.report.grids import contact_sheet


class TensorBoardWriter:
    """Appends a run's metrics to one event file in `folder`; everything written is in the file on return.

    A resumed run passes `first_iteration`: TensorBoard then drops the interrupted process's events from there on.
    """

    def __init__(self, folder: Path, *, first_iteration: int = 0) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first_iteration or None)

    def iteration(self, record: IterationMetrics) -> None:
        self._add(iteration_scalars(record), record.iteration)

    def evaluation(self, record: EvaluationMetrics, pictures: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
        """Writes the scalars of one evaluation and, as one image, its pictures: float32 [3, H, W], a row a prompt."""
        if pictures:
            sheet = np.asarray(contact_sheet(pictures))
            self._writer.add_image(pictures_name(record), sheet, record.iteration, dataformats="HWC")
        self._add(evaluation_scalars(record), record.iteration)

    def close(self) -> None:
        self._writer.close()

    def _add(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
