"""The section `rollout.preview`: how a pool of previews is cut into units, and which previews are finished."""

from __future__ import annotations

from typing import Any

from solrl_ray.config.section import Natural, Positive, Section

PRUNED_MICRO_BATCH = 12
"""`explore.micro_batch` of pruned previews if nobody gave it: the 36 of 96 that go on fill three."""


class Prune(Section):
    """Which previews are finished: after the first steps, a pool is scored on its estimates of x0, and only the best
    and the worst continue. Empty: all are.
    """

    after: Positive | None = None
    """Solver steps before the early scores; fewer than the preview has."""
    keep: Positive | None = None
    """Seeds of a pool that continue, half of them the best and half the worst; each unit keeps an equal, even share. A
    micro-batch that is not full is padded and costs as much as a full one.
    """


class PreviewConfig(Section):
    """How two-stage strategies treat a pool of previews."""

    unit: Positive | None = None
    """Seeds of one work unit, a multiple of `explore.micro_batch` that divides `rollout.pool`. null: the whole pool if
    previews are pruned, because each unit is pruned by itself; else one micro-batch.
    """
    prune: Prune | None = None
    """null: every preview is finished."""
    latent_frames: list[Natural] | None = None
    """Of videos: the latent frames, rising, that are decoded for a preview's score; null: all. ``[0, 1, 2]`` decodes
    the beginning, exactly as of the whole video. Frames with gaps are decoded as if they followed one another:
    approximately, but from all of the video.
    """


def with_micro_batch(rollout: Any) -> Any:
    """The section `rollout` as given, and `explore.micro_batch` in it if previews are pruned and nobody gave it.

    What is no mapping is left for the schema to refuse.
    """
    if not isinstance(rollout, dict):
        return rollout
    explore, preview = rollout.get("explore", {}), rollout.get("preview")
    prune = preview.get("prune") if isinstance(preview, dict) else None
    pruned = isinstance(prune, dict) and any(value is not None for value in prune.values())
    if not pruned or not isinstance(explore, dict) or "micro_batch" in explore:
        return rollout
    return rollout | {"explore": explore | {"micro_batch": PRUNED_MICRO_BATCH}}
