"""The section `rollout.preview`: work units of a pool of previews, and pruning."""

from __future__ import annotations

from typing import Any

from solrl_ray.config.section import Natural, Positive, Section

PRUNED_MICRO_BATCH = 12
"""Default `explore.micro_batch` of pruned previews: the 36 of 96 previews that continue fill three micro-batches."""


class Prune(Section):
    """Early stopping of previews: after the first steps, a pool is scored on its estimates of x0, and only the best and
    worst previews continue. Empty: all previews are finished.
    """

    after: Positive | None = None
    """Solver steps before the early scores; fewer than the steps of a preview."""
    keep: Positive | None = None
    """Seeds per pool that continue, half of them the best and half the worst. Each unit keeps an equal, even number. A
    micro-batch that is not full is padded and costs as much as a full one.
    """


class PreviewConfig(Section):
    """Previews of the two-stage strategy."""

    unit: Positive | None = None
    """Seeds per work unit: a multiple of `explore.micro_batch` that divides `rollout.pool`. null: the whole pool if
    previews are pruned, because pruning compares previews only within a unit; else one micro-batch.
    """
    prune: Prune | None = None
    """Early stopping of previews; null: every preview is finished."""
    latent_frames: list[Natural] | None = None
    """Latent frames of a video to decode for a preview's score, in rising order; null: all. ``[0, 1, 2]`` decodes the
    beginning exactly as in the whole video. Frames with gaps are decoded as if they were consecutive, which is only
    approximate but covers the whole video.
    """


def with_micro_batch(rollout: Any) -> Any:
    """The section `rollout`, with the default `explore.micro_batch` of pruned previews if that key is not set.

    Non-mapping input is returned unchanged; the schema rejects it.
    """
    if not isinstance(rollout, dict):
        return rollout
    explore, preview = rollout.get("explore", {}), rollout.get("preview")
    prune = preview.get("prune") if isinstance(preview, dict) else None
    pruned = isinstance(prune, dict) and any(value is not None for value in prune.values())
    if not pruned or not isinstance(explore, dict) or "micro_batch" in explore:
        return rollout
    return rollout | {"explore": explore | {"micro_batch": PRUNED_MICRO_BATCH}}
