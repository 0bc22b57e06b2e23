"""Names of a run's actors in the cluster, by which other processes find them."""

from __future__ import annotations

import hashlib
from pathlib import Path

CONTROLLER = "controller"
"""Name of the controller, in the namespace of its run."""
EVALUATION = "evaluation"
"""Name of the actor that evaluates a finished run, in the namespace of its output folder."""


def namespace(folder: Path) -> str:
    """Ray namespace of the run in `folder`. It contains a hash of the resolved path, so runs with the same name in
    different folders do not share it.
    """
    path = folder.resolve()
    return f"solrl-{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
