"""A run whose pools grow and shrink while it goes on: same bytes, and who leaves finishes what it holds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.client.controller_actor import ControllerActor
from actors.client.launch import located
from actors.cluster.names import CONTROLLER, namespace
from actors.fleet.actor_factory import ActorClasses, on_this_node
from solrl_ray.cli import main
from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import Progress
from solrl_ray.storage.run_folder import RunFolder
from tests.support.gated import Gated
from tests.support.small import digests, small_config

pytestmark = pytest.mark.usefixtures("local_ray")

PATIENCE = 240.0


def wait_for(controller: Any, reached: Callable[[Progress], bool]) -> Progress:
    deadline = time.monotonic() + PATIENCE
    while True:
        progress: Progress = ray.get(controller.progress.remote(), timeout=60)
        if reached(progress):
            return progress
        assert time.monotonic() < deadline, progress
        time.sleep(0.1)


def explorers(progress: Progress) -> dict[str, str]:
    return {name: state for name, state in progress.workers.items() if name.startswith("explorer")}


@pytest.mark.timeout(900)
@pytest.mark.faults
def test_explorers_that_come_and_go_do_not_change_the_result(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "scaled", "fleet.deadlines.explore=600")
    run = RunFolder.of(config)
    run.create(config, resume=False)
    run.lock.release()
    controller = on_this_node(ControllerActor, CONTROLLER, namespace(run.path))
    handle = controller.remote(located(config), run.path, ActorClasses(explorer=Gated))
    done = handle.run.remote()

    # From 1 to 4 in iteration 1, while explorer-0 is at work.
    wait_for(handle, lambda p: "explore " in explorers(p).get("explorer-0", "") and p.iteration == 1)
    asked = [handle.scale.remote(sizes) for sizes in ({"explorers": 4}, {"regenerators": 1})]  # both at once
    said = ray.get(asked, timeout=60)
    assert said[0].startswith("explorers go from 1 to 4")
    assert json.loads((run.path / "pools.json").read_text()) == {"explorers": 4, "regenerators": 1}
    at_work = wait_for(handle, lambda p: sum("explore " in state for state in explorers(p).values()) >= 3)
    assert set(explorers(at_work)) == {f"explorer-{n}" for n in range(4)}
    assert {sentence for answer in said for sentence in answer.splitlines()} <= set(at_work.messages)
    (tmp_path / "gate-1").touch()

    # From 4 to 2 in iteration 2, by the command line: who has units finishes them, then leaves.
    wait_for(handle, lambda p: sum("explore " in state for state in explorers(p).values()) >= 3 and p.iteration == 2)
    address = ray.get_runtime_context().gcs_address
    assert main(["pool", "scale", str(run.path), "--explorers", "2", "--address", address]) == 0
    assert capsys.readouterr().out == "explorers go from 4 to 2: the newest finish their units and leave\n"
    leaving = wait_for(handle, lambda p: any("then leaves" in state for state in explorers(p).values()))
    assert {name for name, state in explorers(leaving).items() if "then leaves" in state} <= {
        "explorer-2",
        "explorer-3",
    }
    (tmp_path / "gate-2").touch()
    wait_for(handle, lambda p: set(explorers(p)) == {"explorer-0", "explorer-1"})
    ray.get(done, timeout=PATIENCE)
    messages = wait_for(handle, lambda _: True).messages
    gone = ("explorer-2", "explorer-3")
    assert {f"{n} leaves after its present units" for n in gone} | {f"{n} has left" for n in gone} <= set(messages)
    request = messages.index("explorers go from 4 to 2: the newest finish their units and leave")
    assert request < min(messages.index(f"{n} leaves after its present units") for n in gone)
    ray.kill(handle)
    assert digests(config) == digests(calm)
