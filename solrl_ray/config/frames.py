"""Frames of a video: which ones a reward of pictures scores."""

from __future__ import annotations

from typing import Literal

from solrl_ray.config.section import Positive, Section


class Frames(Section):
    """Which frames of a video a reward sees, and how their scores become one."""

    count: Positive
    """Evenly spaced frames, the first and the last among them; 2: these two; 1: the middle one. Of a preview with fewer
    frames at most all.
    """
    combine: Literal["mean", "worst", "together"] = "mean"
    """The ``mean`` of their scores, or the ``worst``, which is the lowest. ``together``, for ``judge`` and
    ``videoreward``: one question about all of them, in their order.
    """


def evenly_spaced(frames: int, count: int) -> list[int]:
    """Positions of `count` frames, all if no more: first, last and evenly spaced ones between; of one the middle."""
    if count == 1:
        return [frames // 2]
    count = min(count, frames)
    return [round(i * (frames - 1) / (count - 1)) for i in range(count)] if count > 1 else [0]
