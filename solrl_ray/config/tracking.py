"""The section `tracking`: where a run's metrics go besides its folder."""

from __future__ import annotations

from typing import Literal

from solrl_ray.config.section import Location, Section


class Tracking(Section):
    """TensorBoard's events are always written. If a tracker fails, the run says so and goes on."""

    trackers: list[Literal["trackio", "wandb"]] = []
    """Trackers that get the metrics as well, under the same names. Each is an extra of this package."""
    project: Location = "solrl"
    """The tracker's project."""
    entity: str = ""
    """User or team at ``wandb``; empty: the login's."""
    space: str = ""
    """Hugging Face Space, ``owner/name``, in which ``trackio`` shows the run; if missing, it is made, private. Empty:
    ``trackio show`` on this machine.
    """
