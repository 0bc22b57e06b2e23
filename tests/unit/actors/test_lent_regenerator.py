"""What a regenerator answers a borrower whose loan it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.workers.regenerator import Regenerator
from solrl_ray.records import Prompt, PromptEmbedding, WorkUnit
from solrl_ray.scheduling.lending import LoanEnded
from tests.support.small import small_config


@pytest.mark.parametrize("lent", [None, 1])
def test_calls_under_a_loan_that_has_ended_change_nothing(tmp_path: Path, lent: int | None) -> None:
    config = small_config(tmp_path, "run")
    worker = Regenerator("regenerator-0", config)
    if lent is not None:
        worker.lend(lent)
    embedding = PromptEmbedding(prompt_id="p", tensors={}, digest="")
    unit = WorkUnit(stage="evaluate", iteration=1, revision=1, prompt_id="p", indices=(0,), policy="ema")
    with pytest.raises(LoanEnded, match="regenerator-0 has been taken back by its run"):
        worker.hold(2, config, b"", embedding)
    with pytest.raises(LoanEnded):
        worker.score(2, unit, Prompt(id="p", text="p"), embedding, False)
