"""How many losses a run bears."""

from __future__ import annotations

import threading

from solrl_ray.errors import RunError


class Budget:
    """Replacements left in this run, over all pools: a fleet that keeps dying is a diagnosis, not a retry."""

    def __init__(self, replacements: int) -> None:
        self.left = self.total = replacements
        self._lock = threading.Lock()  # the learner group's are spent in another thread

    def spend(self, worker: str, reason: str) -> None:
        """Use one up. Raises RunError if none is left."""
        with self._lock:
            if self.left == 0:
                raise RunError(
                    f"{worker} was lost ({reason}), and all {self.total} replacements of fleet.max_replacements are "
                    "used"
                )
            self.left -= 1
