"""How many losses a run tolerates. Pure."""

from __future__ import annotations

from solrl_ray.errors import RunError


class Replacements:
    """Replacements left in this run, over all pools. A fleet that keeps dying needs a diagnosis, not retries."""

    def __init__(self, total: int) -> None:
        self.left = self.total = total

    def spend(self, worker: str, reason: str) -> None:
        """Use one up. Raises RunError if none is left."""
        if self.left == 0:
            raise RunError(
                f"{worker} was lost ({reason}), and all {self.total} replacements of fleet.max_replacements are used"
            )
        self.left -= 1
