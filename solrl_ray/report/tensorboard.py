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

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.report.grids import contact_sheet, encode_png

SCALARS = {
    "reward/train": "reward_mean",
    "reward/train_std": "reward_std",
    "reward/proxy": "proxy_reward_mean",
    "rank_fidelity/spearman": "spearman",
    "rank_fidelity/kendall": "kendall",
    "rank_fidelity/side_agreement": "side_agreement",
    "learning/loss": "loss",
    "learning/policy_loss": "policy_loss",
    "learning/kl": "kl",
    "learning/gradient_norm": "gradient_norm",
    "learning/ratio_mean": "ratio_mean",
    "learning/ratio_deviation": "ratio_deviation",
    "learning/clip_fraction": "clip_fraction",
    "counts/candidates": "candidates",
    "counts/dropped": "dropped",
    "counts/samples": "samples",
    "counts/requeued_units": "requeued_units",
    "counts/duplicate_results": "duplicate_results",
    "wait_share/weights": "weights_wait",
}
"""Name of a curve → field of `IterationMetrics`; nothing is written of a field that is None."""


def iteration_scalars(record: IterationMetrics) -> dict[str, float]:
    """The scalars of one iteration, by TensorBoard name."""
    scalars = {name: getattr(record, field) for name, field in SCALARS.items()}
    if record.preview_steps is not None:
        scalars["rank_fidelity/fallback_level"] = record.fallback_level
        scalars["rank_fidelity/preview_steps"] = record.preview_steps
    several = {"audit": record.audit, "wall_seconds": record.seconds, "busy_seconds": record.busy_seconds}
    scalars |= {f"{name}/{part}": value for name, parts in several.items() for part, value in parts.items()}
    return {name: float(value) for name, value in scalars.items() if value is not None}


class TensorBoardWriter:
    """Appends a run's metrics to one event file in `folder`; everything written is on the disk on return.

    A resumed run passes `first_iteration`: TensorBoard then drops what an interrupted process had written
    from there on.
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
        name = f"heldout_{record.policy}"
        scalars = {f"reward/{name}": record.reward_mean, f"reward/{name}_stderr": record.reward_stderr}
        self._add(record.iteration, _scalars(scalars))
        if pictures:
            sheet = contact_sheet(pictures)
            size = {"width": sheet.width, "height": sheet.height}
            image = Summary.Image(**size, colorspace=3, encoded_image_string=encode_png(sheet))
            self._add(record.iteration, [Summary.Value(tag=f"heldout/{record.policy}", image=image)])

    def close(self) -> None:
        self._records.close()

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _scalars(scalars: dict[str, float]) -> list[Summary.Value]:
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in sorted(scalars.items())]
