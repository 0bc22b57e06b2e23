"""A run whose pools grow and shrink while it goes on: same bytes, and who leaves finishes what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from actors.fleet.actor_factory import ActorClasses
from solrl_ray.cli import main
from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import Progress
from solrl_ray.storage.run_folder import RunFolder
from tests.support import live
from tests.support.gated import Gated
from tests.support.live import begun
from tests.support.patience import patience
from tests.support.small import digests, small_config

pytestmark = pytest.mark.usefixtures("local_ray")


def explorers(progress: Progress) -> dict[str, str]:
    return {name: state for name, state in progress.workers.items() if name.startswith("explorer")}


@pytest.mark.slow  # a pool is scaled in the soak, too
def test_explorers_that_come_and_go_do_not_change_the_result(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "scaled", "fleet.deadlines.explore=600")
    run = RunFolder.of(config)
    handle, done = begun(config, ActorClasses(explorer=Gated))

    def wait_for(what: str, reached: Callable[[Progress], bool]) -> Progress:
        return live.wait_for(what, handle, reached)

    def exploring(progress: Progress) -> int:
        return sum("explore " in state for state in explorers(progress).values())

    # From 1 to 4 in iteration 1, while explorer-0 is at work.
    wait_for("a unit of iteration 1", lambda p: exploring(p) > 0 and p.iteration == 1)
    asked = [handle.scale.remote(sizes) for sizes in ({"explorers": 4}, {"regenerators": 1})]  # both at once
    said = ray.get(asked, timeout=patience())
    assert said[0].startswith("explorers go from 1 to 4")
    at_work = wait_for("more explorers at work", lambda p: exploring(p) >= 3)
    assert set(explorers(at_work)) == {f"explorer-{n}" for n in range(4)}
    assert {sentence for answer in said for sentence in answer.splitlines()} <= set(at_work.messages)
    (tmp_path / "gate-1").touch()

    # From 4 to 2 in iteration 2, by the command line: who has units finishes them, then leaves.
    wait_for("iteration 2", lambda p: exploring(p) >= 3 and p.iteration == 2)
    address = ray.get_runtime_context().gcs_address
    assert main(["pool", "scale", str(run.path), "--explorers", "2", "--address", address]) == 0
    assert capsys.readouterr().out == "explorers go from 4 to 2: the newest finish their units and leave\n"
    leaving = wait_for("who leaves", lambda p: any("then leaves" in state for state in explorers(p).values()))
    assert {name for name, state in explorers(leaving).items() if "then leaves" in state} <= {
        "explorer-2",
        "explorer-3",
    }
    (tmp_path / "gate-2").touch()
    wait_for("their end", lambda p: set(explorers(p)) == {"explorer-0", "explorer-1"})
    ray.get(done, timeout=patience())
    messages = live.progress(handle).messages
    gone = ("explorer-2", "explorer-3")
    assert {f"{n} leaves after its present units" for n in gone} | {f"{n} has left" for n in gone} <= set(messages)
    request = messages.index("explorers go from 4 to 2: the newest finish their units and leave")
    assert request < min(messages.index(f"{n} leaves after its present units") for n in gone)
    ray.kill(handle)
    assert digests(config) == digests(calm)
