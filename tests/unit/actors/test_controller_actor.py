"""The controller as an actor, before there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.client.controller_actor import ControllerActor
from actors.fleet.actor_factory import ActorClasses
from solrl_ray.errors import UserError
from tests.support.small import folder, small_config


def test_a_controller_that_cannot_be_made_has_a_name(tmp_path: Path) -> None:
    """Ray asks for it before it tells why."""
    config = small_config(tmp_path, "unmade", f"prompts.train='{tmp_path / 'nothere.txt'}'")
    front = ControllerActor.__new__(ControllerActor)
    with pytest.raises(UserError, match="nothere"):
        front.__init__(config, folder(config), ActorClasses())  # type: ignore[misc]
    assert repr(front) == "controller of unmade, 3 iterations"
