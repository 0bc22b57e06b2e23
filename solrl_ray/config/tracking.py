"""The section `tracking`: where the metrics of a run go beside its folder."""

from __future__ import annotations

from typing import Literal

from solrl_ray.config.section import Location, Section


class Tracking(Section):
    """TensorBoard's events are written in any case. What fails here is a message, and the run goes on without it."""

    trackers: list[Literal["trackio", "wandb"]] = []
    """Who gets the metrics as well, under the same names; each is a package of its own and an extra of this one."""
    project: Location = "solrl"
    """Where the tracked run is, beside others."""
    entity: str = ""
    """Of ``wandb``: the user or team that the project belongs to; empty: that of the login."""
    space: str = ""
    """Of ``trackio``: a Hugging Face Space, ``owner/name``, that shows the run, made private if it is not there yet;
    empty: this machine alone has it, for ``trackio show``."""
