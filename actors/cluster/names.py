"""The names of a run's actors on its cluster, by which other processes find them."""

from __future__ import annotations

import hashlib
from pathlib import Path

CONTROLLER = "controller"
"""The controller's name, in the namespace of its run."""
EVALUATION = "evaluation"
"""The name of the actor that evaluates a finished run, in the namespace of its output folder."""


def namespace(folder: Path) -> str:
    """Ray namespace of the run in `folder`: two runs never share one, even under equal names.

    Links are resolved first.
    """
    place = folder.resolve()
    return f"solrl-{place.name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"
