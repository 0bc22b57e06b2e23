"""The live audit: measured on a real run, what the fallback ladder goes by, and out of reach of what is learned."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers.regenerator import Regenerator
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import at_fallback_level
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit
from solrl_ray.report.data import read_run
from solrl_ray.storage.journal import Journal
from tests import oracle
from tests.support.small import digests, folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")

FLOOR = 0.6
"""Below the Spearman of the chosen seeds in each iteration, above that of pools with poison in them."""


def drawn(config: Config) -> list[tuple[int, int | None, str | None]]:
    return [(r.fallback_level, r.preview_steps, r.preview_precision) for r in read_run(folder(config)).iterations]


def of_the_oracle(config: Config, levels: Sequence[int]) -> tuple[str, str]:
    threads = torch.get_num_threads()
    result = oracle.run(config, iterations=len(levels), levels=[at_fallback_level(config, level) for level in levels])
    torch.set_num_threads(threads)
    return result.selection_digest, result.lora_digest


class Poisoned(Regenerator):
    """What it says of audited seeds is far off: if any of it were learned from, training would change."""

    def audit(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        result = super().audit(unit, prompt, embedding)
        return dataclasses.replace(result, rewards=tuple(1000.0 + reward for reward in result.rewards))


def test_an_audit_makes_explorers_ahead_start_anew_for_a_higher_tier_and_never_reaches_selection_or_learning(
    tmp_path: Path,
) -> None:
    fidelity = f"floor: {FLOOR}, patience: 1, fallback: [{{precision: float32}}], audit_prompts: 2, audit_seeds: 3"
    config = small_config(
        tmp_path, "audited", "rollout.explore.steps=2", "rollout.max_staleness=1", f"fidelity={{{fidelity}}}"
    )
    launch.train(config, live=False, classes=ActorClasses(regenerator=Poisoned))

    # Iteration 1 is explored before iteration 0 is measured; the chosen seeds alone would stay above the floor.
    assert drawn(config) == [(0, 2, "nvfp4-emulated"), (0, 2, "nvfp4-emulated"), (1, 2, "float32")]
    assert all(record.spearman > FLOOR for record in read_run(folder(config)).iterations)
    attested = json.loads((folder(config) / "attestations.json").read_text())
    assert {(a["worker"], a["tier"]) for a in attested if a["worker"].startswith("explorer")} == {
        ("explorer-0", "nvfp4-emulated"),
        ("explorer-0.1", "float32"),
    }
    assert digests(config) == of_the_oracle(config, [0, 0, 1])

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
