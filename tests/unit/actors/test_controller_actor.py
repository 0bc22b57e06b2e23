"""The controller as an actor, before there is one; and what somebody who interrupts a run is told."""

from __future__ import annotations

import asyncio
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from actors import ray_world
from actors.client import launch
from actors.client.controller_actor import ControllerActor
from actors.fleet.actor_factory import ActorClasses
from actors.workers.card import GpuProcess
from solrl_ray.cli import main
from solrl_ray.config.loading import to_yaml
from solrl_ray.errors import RunError
from solrl_ray.storage.run_folder import RunFolder
from tests.support.small import folder, small_config


def test_a_controller_that_cannot_be_made_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks for it before it tells why."""

    def refuse(factory: Any) -> None:
        raise RunError("the cluster is gone")

    monkeypatch.setattr(ray_world, "RayWorld", refuse)
    config = small_config(tmp_path, "unmade")
    front = ControllerActor.__new__(ControllerActor)
    with pytest.raises(RunError, match="the cluster is gone"):
        front.__init__(config, folder(config), ActorClasses())  # type: ignore[misc]
    assert repr(front) == "controller of unmade, 3 iterations"


@pytest.mark.parametrize(
    "role", [ControllerActor, GpuProcess, *astuple(ActorClasses())], ids=lambda role: role.__name__
)
def test_an_actor_whose_constructor_was_never_called_has_a_name(role: type) -> None:
    assert role.__name__.lower().startswith(repr(role.__new__(role)).lower()[:8])


def test_who_asks_a_run_that_is_still_opening_is_told_to_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_world.RayWorld, "__init__", lambda self, factory: None)
    config = small_config(tmp_path, "opening")
    front = ControllerActor(config, folder(config), ActorClasses())
    assert asyncio.run(front.progress()).state == "starting"
    with pytest.raises(RunError, match=r"^the run is still loading its last checkpoint; try again in a moment$"):
        asyncio.run(front.scale({"explorers": 2}))


@pytest.mark.parametrize("begun", [False, True])
def test_who_interrupts_a_run_is_told_how_it_goes_on(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "cut")
    run = folder(config)

    def interrupted(*_: Any, **__: Any) -> None:
        if begun:
            (run / "journal").mkdir()
            (run / "journal" / "iteration-000000.jsonl").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_work", interrupted)
    file = tmp_path / "cut.yaml"
    file.write_text(to_yaml(config))
    assert main(["train", str(file), "--no-live"]) == 130
    when = "" if begun else " while it was starting, before anything was trained"
    assert capsys.readouterr().err == f"\ninterrupted{when}; go on with: solrl train --resume {run}\n"
    (event,) = RunFolder(run).read_events()
    assert (event.iteration, event.kind, event.what) == (0, "end", "interrupted")
