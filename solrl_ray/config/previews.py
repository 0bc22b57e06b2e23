"""The section `rollout.preview`: how a pool of previews is cut into units, and which previews are finished."""

from __future__ import annotations

from solrl_ray.config.section import Positive, Section


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
