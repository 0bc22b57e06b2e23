"""Writes TensorBoard events: a run's scalars, and its pictures as one sheet. Names and steps are those of
`solrl_ray.metrics.scalars`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from solrl_ray.report.trackers import TrackerWriter


class TensorBoardWriter(TrackerWriter):
    """Appends a run's metrics to one event file in `folder`; everything written is in the file on return.

    A resumed run passes `first_iteration`: TensorBoard then drops the interrupted process's events from there on.
    """

    def __init__(self, folder: Path, *, first_iteration: int = 0) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first_iteration or None)
        super().__init__(self._add, np.asarray, self._writer.close)

    def _add(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                self._writer.add_image(name, value, step, dataformats="HWC")
            else:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()
