"""TensorBoard events, from known numbers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from solrl_ray.report.trackers import tensorboard
from tests.support.made_runs import evaluations, iteration


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return events


def test_tensorboard_reads_the_metrics_back_under_their_names(tmp_path: Path) -> None:
    with closing(tensorboard(tmp_path)) as writer:
        for number in range(3):
            writer.iteration(iteration(number))
        final = evaluations()[2]
        writer.evaluation(final, [[torch.zeros(3, 32, 32)] * 4] * 2)
    events = read_events(tmp_path)
    spearman = events.Scalars("rank_fidelity/spearman")
    assert [entry.step for entry in spearman] == [0, 1, 2]
    assert [entry.value for entry in spearman] == pytest.approx([0.90, 0.91, 0.92])
    assert events.Scalars("reward/train")[1].value == pytest.approx(0.31)
    assert events.Scalars("wall_seconds/total")[0].value == pytest.approx(10.0)
    assert events.Scalars("counts/candidates")[0].value == 288
    assert [(e.step, e.value) for e in events.Scalars("reward/heldout_ema")] == [(3, pytest.approx(29 / 60))]
    (image,) = events.Images("heldout/ema")
    assert (image.width, image.height) == (2 + 4 * 98, 2 + 2 * 98)


def test_tensorboard_drops_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    with closing(tensorboard(tmp_path)) as writer:
        for number in range(3):
            writer.iteration(iteration(number))
    with closing(tensorboard(tmp_path, first_iteration=1)) as writer:
        writer.iteration(replace(iteration(1), reward_mean=0.9))
    entries = read_events(tmp_path).Scalars("reward/train")
    assert [(entry.step, round(entry.value, 3)) for entry in entries] == [(0, 0.3), (1, 0.9)]
