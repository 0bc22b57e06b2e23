"""How far exploring may run ahead of learning. Pure.

::

    staleness 0   explore t (revision t) ─► regenerate t ─► update t ─► explore t+1 (revision t+1) …
    staleness 1   explore t (t-1) ─► explore t+1 (t) ─────────────────► explore t+2 (t+1) …
                                    regenerate t ─► update t ─► regenerate t+1 ─► …

Iteration t explores with exactly revision max(0, t - staleness), even if a newer one exists, so that the selection does
not depend on speed. An explorer loads the next revision when nothing is left to explore with its present one, so that
repeated units always find workers with their revision.
"""

from __future__ import annotations


def staleness_of(iteration: int, max_staleness: int) -> int:
    """How many revisions behind the current one iteration `iteration` explores."""
    return min(iteration, max_staleness)
