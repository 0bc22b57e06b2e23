"""How far exploring may run ahead of learning. Pure.

::

    staleness 0   explore t (revision t) ─► regenerate t ─► update t ─► explore t+1 (revision t+1) …
    staleness 1   explore t (t-1) ─► explore t+1 (t) ─────────────────► explore t+2 (t+1) …
                                    regenerate t ─► update t ─► regenerate t+1 ─► …

Iteration t explores with revision max(0, t - staleness) and with no other, even if a newer one is there, so that what
is selected does not depend on who is faster. An explorer loads the next revision when nothing is left to explore with
the one it has: then whatever is handed out again finds workers that hold what it wants.
"""

from __future__ import annotations


def staleness_of(iteration: int, max_staleness: int) -> int:
    """How many revisions behind the current one iteration `iteration` explores."""
    return min(iteration, max_staleness)
