"""What a run that has ended gives back, and what may come between."""

from __future__ import annotations

import threading

import pytest
from ray.exceptions import RaySystemError

from actors.fleet import actor_factory


def test_who_gives_places_back_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(actor_factory, "RELEASE_SECONDS", 0.1)
    monkeypatch.setattr(actor_factory, "_release_placement_groups", lambda namespace: threading.Event().wait())
    actor_factory.release_placement_groups("solrl-demo")
    said = "note: releasing the placement groups of solrl-demo passed its deadline of 0.1 s: Ray does not answer\n"
    assert capsys.readouterr().out == said


def test_a_cluster_that_is_gone_has_given_everything_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(namespace: str) -> None:
        raise RaySystemError("the cluster is gone")

    monkeypatch.setattr(actor_factory, "_release_placement_groups", gone)
    actor_factory.release_placement_groups("solrl-demo")
    assert capsys.readouterr().out == ""
