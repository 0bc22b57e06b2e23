"""TensorBoard events, written directly in the event-file format: no TensorFlow, no thread.

Scalar names never change. The step of an iteration is the number of updates that its policy has had, so
training and held-out rewards share one axis:

* ``reward/`` train, train_std, proxy, heldout_<policy>, heldout_<policy>_stderr
* ``rank_fidelity/`` spearman, kendall, side_agreement; not where there are no previews
* ``audit/`` estimates for whole pools with their 95 % intervals, where `fidelity.audit_prompts` asks for them
* ``learning/`` loss, policy_loss, kl, gradient_norm; of objectives with ratios ratio_mean, ratio_deviation,
  clip_fraction
* ``wall_seconds/<stage>``, ``busy_seconds/<stage>``
* ``counts/`` candidates, samples, requeued_units, duplicate_results
* images: ``heldout/<policy>``
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.report.grids import contact_sheet, encode_png, shrink

LARGEST_PICTURE = 256
"""Longest side of a picture in a contact sheet, pixels; larger ones are reduced."""
ENLARGED_PICTURE = 96
"""Pictures are enlarged by the whole number that brings their width up to this, pixels."""


def iteration_scalars(record: IterationMetrics) -> dict[str, float]:
    """The scalars of one iteration, by TensorBoard name."""
    scalars = {
        "reward/train": record.reward_mean,
        "reward/train_std": record.reward_std,
        "reward/proxy": record.proxy_reward_mean,
        "learning/loss": record.loss,
        "learning/policy_loss": record.policy_loss,
        "learning/kl": record.kl,
        "learning/gradient_norm": record.gradient_norm,
        "counts/candidates": float(record.candidates),
        "counts/samples": float(record.samples),
        "counts/requeued_units": float(record.requeued_units),
        "counts/duplicate_results": float(record.duplicate_results),
    }
    ratios = {
        "learning/ratio_mean": record.ratio_mean,
        "learning/ratio_deviation": record.ratio_deviation,
        "learning/clip_fraction": record.clip_fraction,
    }
    scalars |= {name: value for name, value in ratios.items() if value is not None}
    fidelity = {name: getattr(record, name) for name in ("spearman", "kendall", "side_agreement")}
    scalars |= {f"rank_fidelity/{name}": value for name, value in fidelity.items() if value is not None}
    if record.preview_steps is not None:
        scalars |= {
            "rank_fidelity/fallback_level": float(record.fallback_level),
            "rank_fidelity/preview_steps": float(record.preview_steps),
        }
    scalars |= {f"audit/{name}": value for name, value in record.audit.items()}
    scalars["wait_share/weights"] = record.weights_wait
    scalars |= {f"wall_seconds/{stage}": value for stage, value in record.seconds.items()}
    scalars |= {f"busy_seconds/{stage}": value for stage, value in record.busy_seconds.items()}
    return scalars


def evaluation_scalars(record: EvaluationMetrics) -> dict[str, float]:
    """The scalars of one evaluation, by TensorBoard name."""
    return {
        f"reward/heldout_{record.policy}": record.reward_mean,
        f"reward/heldout_{record.policy}_stderr": record.reward_stderr,
    }


class TensorBoardWriter:
    """Appends a run's metrics to one event file in `folder`; everything written is on the disk on return.

    A resumed run passes `first_iteration`: TensorBoard then drops what an interrupted process had written
    from there on.
    """

    def __init__(self, folder: Path, *, first_iteration: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

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
        self._scalars(iteration_scalars(record), step=record.iteration)

    def evaluation(self, record: EvaluationMetrics, pictures: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
        """Writes the scalars of one evaluation and, if given, its pictures as one image.

        Args:
            pictures: one row per prompt of float32 [3, H, W] in [0, 1].
        """
        self._scalars(evaluation_scalars(record), step=record.iteration)
        if pictures:
            rows = [[shrink(image, LARGEST_PICTURE) for image in row] for row in pictures]
            sheet = contact_sheet(rows, scale=max(1, ENLARGED_PICTURE // rows[0][0].shape[-1]))
            self._image(f"heldout/{record.policy}", sheet, step=record.iteration)

    def close(self) -> None:
        self._records.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scalars(self, scalars: dict[str, float], *, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in sorted(scalars.items())]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _image(self, tag: str, image: torch.Tensor, *, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        _, height, width = image.shape
        encoded = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode_png(image))
        summary = Summary(value=[Summary.Value(tag=tag, image=encoded)])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: object) -> None:
        self._records.write(event.SerializeToString())  # type: ignore[attr-defined]
        self._records.flush()
