"""Explorers of another score class have prompts of their own, so what they bring does not depend on who was free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers.explorer import Explorer
from solrl_ray.config.schema import Config
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit
from solrl_ray.scheduling.worker_state import kind_of
from solrl_ray.storage.run_folder import RunFolder
from tests.chaos.test_workers import once
from tests.support.small import digests, folder, small_config, summary

pytestmark = pytest.mark.usefixtures("local_ray")

OTHERS = "fleet.other_explorers=[{{name: other, count: {count}, prompts: 1, threads: {threads}}}]"


def brought(config: Config) -> list[tuple[str, str, str]]:
    """Prompt, kind of worker and score class of every preview in the journals; who should have made it is checked."""
    found = []
    for iteration in range(config.run.iterations):
        header, *entries = RunFolder.of(config).journal(iteration).entries()
        kinds = dict(zip(header["plan"]["prompt_ids"], header["plan"]["kinds"], strict=True))
        previews = [e for e in entries if e["kind"] == "explore"]
        assert {kind_of(e["worker"]) for e in previews} == {"", "other"}
        assert all(kind_of(e["worker"]) == kinds[e["prompt"]] for e in previews)
        found += [(e["prompt"], kinds[e["prompt"]], e["score_class"]) for e in previews]
    return found


def iterations(config: Config) -> list[dict[str, Any]]:
    """Metrics of a run's iterations."""
    lines = (folder(config) / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == "iteration"]


class Killed(Explorer):
    """The first of the others that has a unit of iteration 1 dies with it in its hands."""

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        if kind_of(self._name) == "other" and unit.iteration == 1:
            once(self._config.run.root, "killed")
        return super().explore(unit, prompt, embedding)


def test_two_score_classes_rank_the_same_whoever_is_killed_and_however_many_they_are(tmp_path: Path) -> None:
    one = small_config(tmp_path, "one", OTHERS.format(count=1, threads=2), "run.iterations=2")
    launch.train(one, live=False)
    classes = {(kind, score_class) for _, kind, score_class in brought(one)}
    assert all(set(entry["spearman_by_kind"]) == {"", "other"} for entry in iterations(one))
    assert len(classes) == len({score_class for _, score_class in classes}) == 2  # each kind has one of its own

    both = ("fleet.explorers.count=2", "run.iterations=2")
    more = small_config(tmp_path, "more", OTHERS.format(count=2, threads=2), *both)
    launch.train(more, live=False, classes=ActorClasses(explorer=Killed))
    assert summary(more)["requeued_units"] >= 1
    assert sorted(brought(more)) == sorted(brought(one))
    assert digests(more) == digests(one)
