"""Pruned previews on real runs: whoever does a unit, however often, the oracle's seeds are chosen and learned from."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers.explorer import Explorer
from solrl_ray.config.schema import Config
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit
from solrl_ray.report.data import read_run
from solrl_ray.storage.run_folder import RunFolder
from tests import oracle
from tests.support.small import digests, folder, small_config, summary

pytestmark = pytest.mark.usefixtures("local_ray")

PRUNED = (
    "run.iterations=2",
    "rollout.explore.steps=5",
    "rollout.preview={unit: 8, prune: {after: 2, keep: 6}}",
)
"""A pool of 8 is one unit of two micro-batches; 6 of its seeds go on, as one and a half."""


class DiesBetweenItsScores(Explorer):
    """Once, when the early scores of a unit of iteration 1 are there and who goes on is decided."""

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        (sampler,) = self._sampler._samplers.values()
        mark, finish = Path(self._config.run.root) / "died", sampler._finish

        def dying(*arguments: Any) -> torch.Tensor:
            if unit.iteration == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return finish(*arguments)

        sampler._finish = dying  # type: ignore[method-assign]
        try:
            return super().explore(unit, prompt, embedding)
        finally:
            sampler._finish = finish  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> oracle.OracleResult:
    threads = torch.get_num_threads()
    result = oracle.run(small_config(tmp_path_factory.mktemp("oracle"), "oracle", *PRUNED), iterations=2)
    torch.set_num_threads(threads)
    return result


def test_a_pruned_run_has_the_bytes_of_the_oracle_also_if_an_explorer_dies_between_two_scores(
    tmp_path: Path, plain: oracle.OracleResult
) -> None:
    config = small_config(tmp_path, "pruned", *PRUNED, "fleet.explorers.count=3")
    launch.train(config, live=False, classes=ActorClasses(explorer=DiesBetweenItsScores))
    assert (tmp_path / "died").exists()
    assert summary(config)["requeued_units"] >= 1
    assert digests(config) == (plain.selection_digest, plain.lora_digest)
    check_journal_and_records(config, plain)


def check_journal_and_records(config: Config, plain: oracle.OracleResult) -> None:
    """Each pool was one unit; who was dropped is written down and is not chosen."""
    for record in read_run(folder(config)).iterations:
        assert (record.candidates, record.dropped, record.expected_dropped) == (24, 6, 6)
        entries = RunFolder(folder(config)).journal(record.iteration).entries()
        assert entries[0]["plan"]["prune"] == {"after": 2, "keep": 6}
        explored = {e["prompt"]: e for e in entries if e["kind"] == "explore"}
        assert len(explored) == 3
        for prompt_id, selection in plain.selections[record.iteration].items():
            entry = explored[prompt_id]
            chosen = {candidate.index for candidate in selection.chosen}
            assert len(entry["dropped"]) == 2
            assert len(bytes.fromhex(entry["early"])) == 8 * 4
            assert not chosen & set(entry["dropped"])
