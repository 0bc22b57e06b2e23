"""The live audit: measured on a real run, and out of reach of what is learned."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from actors import commands
from actors.regenerator import Regenerator
from actors.roles import Roles
from solrl_ray.config.schema import Config
from solrl_ray.journal import Journal
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit
from solrl_ray.report.data import read_run
from tests.small import digests, folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")


class Poisoned(Regenerator):
    """What it says of audited seeds is far off: if any of it were learned from, training would change."""

    def audit(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        result = super().audit(unit, prompt, embedding)
        return dataclasses.replace(result, rewards=tuple(1000.0 + reward for reward in result.rewards))


@pytest.mark.slow
def test_an_audit_is_measured_and_never_reaches_selection_or_learning(calm: Config, tmp_path: Path) -> None:
    audited = ("fidelity={audit_prompts: 2, audit_seeds: 3}", "fleet.regenerators.count=2")
    config = small_config(tmp_path, "audited", *audited)
    commands.train(config, live=False, roles=Roles(regenerator=Poisoned))
    assert digests(config) == digests(calm)
    for record in read_run(folder(config)).iterations:
        assert (record.audit["pools"], record.audit["seeds"]) == (2, 6)
        assert record.audit["spearman_low"] <= record.audit["spearman"] <= record.audit["spearman_high"]
        assert record.audit["regret"] > 900  # the poison is seen where it belongs
        entries = Journal(folder(config) / "journal" / f"iteration-{record.iteration:06d}.jsonl").entries()
        chosen = {e["prompt"]: set(e["best"] + e["worst"]) for e in entries if e["kind"] == "selection"}
        audits = {e["prompt"]: set(e["indices"]) for e in entries if e["kind"] == "audit"}
        assert len(audits) == 2
        assert all(len(seeds) == 3 and not seeds & chosen[prompt_id] for prompt_id, seeds in audits.items())
    assert "Whole pools" in (folder(config) / "report.html").read_text()
