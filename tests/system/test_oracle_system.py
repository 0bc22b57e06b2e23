"""The whole system against the oracle: actors and streams change nothing that is chosen or learned."""

from __future__ import annotations

import pytest
import torch

from solrl_ray.config.schema import Config
from solrl_ray.storage.run_folder import RunFolder
from tests import oracle
from tests.support.small import digests, folder


@pytest.fixture(scope="module")
def plain(calm: Config) -> oracle.OracleResult:
    threads = torch.get_num_threads()
    result = oracle.run(calm, iterations=calm.run.iterations)
    torch.set_num_threads(threads)
    return result


def test_a_run_selects_and_learns_the_bytes_of_the_oracle(calm: Config, plain: oracle.OracleResult) -> None:
    assert digests(calm) == (plain.selection_digest, plain.lora_digest)


def test_every_choice_in_the_journal_is_the_oracles(calm: Config, plain: oracle.OracleResult) -> None:
    for iteration, selections in enumerate(plain.selections):
        entries = RunFolder(folder(calm)).journal(iteration).entries()
        chosen = {e["prompt"]: (e["top"], e["bottom"]) for e in entries if e["kind"] == "selection"}
        assert chosen == {
            prompt_id: ([c.index for c in s.top], [c.index for c in s.bottom]) for prompt_id, s in selections.items()
        }
