"""TensorBoard events, written directly in the event-file format: no TensorFlow, no thread.

Names and steps are those of `solrl_ray.metrics.scalars`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.metrics.scalars import evaluation_scalars, iteration_scalars, pictures_name
from solrl_ray.report.grids import contact_sheet, encode_png


class TensorBoardWriter:
    """Appends a run's metrics to one event file in `folder`; everything written is on the disk on return.

    A resumed run passes `first_iteration`: TensorBoard then drops the interrupted process's events from there on.
    """

    def __init__(self, folder: Path, *, first_iteration: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        started = time.time()
        name = f"events.out.tfevents.{started:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("xb"))
        self._write(Event(wall_time=started, file_version="brain.Event:2"))
        if first_iteration > 0:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=started, step=first_iteration, session_log=start))

    def iteration(self, record: IterationMetrics) -> None:
        """Writes the scalars of one iteration."""
        self._add(record.iteration, _scalars(iteration_scalars(record)))

    def evaluation(self, record: EvaluationMetrics, pictures: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
        """Writes the scalars of one evaluation and, as one image, its pictures: float32 [3, H, W], a row a prompt."""
        self._add(record.iteration, _scalars(evaluation_scalars(record)))
        if pictures:
            sheet = contact_sheet(pictures)
            size = {"width": sheet.width, "height": sheet.height}
            image = Summary.Image(**size, colorspace=3, encoded_image_string=encode_png(sheet))
            self._add(record.iteration, [Summary.Value(tag=pictures_name(record), image=image)])

    def close(self) -> None:
        self._records.close()

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _scalars(scalars: dict[str, float]) -> list[Summary.Value]:
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in sorted(scalars.items())]
