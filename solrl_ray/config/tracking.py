"""The section `tracking`: where the metrics of a run go beside its folder."""

from __future__ import annotations

from typing import Literal

from solrl_ray.config.section import Location, Section


class Tracking(Section):
    """TensorBoard's events are always written. If a tracker fails, the run says so and goes on."""

    trackers: list[Literal["trackio", "wandb"]] = []
    """Trackers that get the metrics as well, under the same names. Each is an extra of this package."""
    project: Location = "solrl"
    """Where the tracked run is, beside others."""
    entity: str = ""
    """User or team at ``wandb``; empty: that of the login."""
    space: str = ""
    """Hugging Face Space, ``owner/name``, in which ``trackio`` shows the run; it is made, private, if it is missing.
    Empty: ``trackio show`` on this machine."""
