"""Under which names the actors of a run are found on its cluster."""

from __future__ import annotations

import hashlib
from pathlib import Path

CONTROLLER = "controller"
"""The controller's name, in the namespace of its run."""
EVALUATION = "evaluation"
"""The name of what evaluates a finished run, in the namespace of the folder that it writes."""


def namespace(folder: Path) -> str:
    """Ray namespace of the run in `folder`: two runs never share one, even under equal names.

    By whatever way the folder is named: a process that asks how the run is may know it by a link.
    """
    place = folder.resolve()
    return f"solrl-{place.name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"
