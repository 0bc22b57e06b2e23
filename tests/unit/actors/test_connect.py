"""Joining a cluster, or starting a local Ray, on a machine that is busy."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import ray

from actors.client import connect
from solrl_ray.errors import RunError


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What joining changes in it is put back."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


def busy(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Ray's starts time out so many times; the list gets the address of each."""
    asked: list[str] = []

    def init(*, address: str, **_: Any) -> str:
        asked.append(address)
        if len(asked) <= times:
            raise Exception("The current node timed out during startup. This could happen because some of the raylet")
        return "context"

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return asked


def test_a_start_of_ray_that_times_out_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = busy(monkeypatch, 1)
    assert connect.join(None) == "context"
    assert asked == ["local", "local"]


def test_a_machine_on_which_ray_does_not_start_twice_is_told_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    busy(monkeypatch, 2)
    with pytest.raises(RunError, match="twice: this machine is too busy"):
        connect.join(None)


def test_another_error_of_the_start_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n  Ray: 2.59.0")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(RunError, match=r"did not start: Version mismatch: .* with: Ray: 2\.59\.0$"):
        connect.join(None)
