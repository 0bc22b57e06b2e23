"""How good is a plan's estimate of a card's memory? Peaks that were measured, beside today's estimate of the same run.

    python benchmarks/card_peaks.py

    split         many_gpus.py, two H100s: explorer and regenerator on one, a learner rank on the other
    whole loop    full_iteration.py on an H200, in an older version with three processes on the card: its estimate
                  contains what that did not free, and the context of the process that read the peak

Each is estimated with the settings that the run had at the time. No peak of a process with several roles has been
measured yet. Needs no GPU; reads benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solrl_ray.cli.outline import facts_of
from solrl_ray.config import named
from solrl_ray.config.arithmetic import Arithmetic, describe
from solrl_ray.config.card_memory import EXPLORE, LEARN, LOAD, REGENERATE, CardMemory, cards
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.models.shapes import shipped

RESULTS = Path(__file__).parent / "results"
WATCHER = 500_000_000
"""Bytes of the process that read the peaks of whole loops: a context without kernels."""
WHOLE = (("flux", "flux1_dev", 0), ("sd3", "sd35_large", 1), ("sana", "sana_1600m", 1))
"""Name of the result, model, `learner.activation_memory`."""
SHARED = "fleet={explorers: {num_gpus: 0.5}, regenerators: {num_gpus: 0.5}, learners: {num_gpus: 1}}"
THIRDS = "fleet={explorers: {num_gpus: 0.33}, regenerators: {num_gpus: 0.33}, learners: {num_gpus: 0.33}}"
"""What a run refuses today: a learner rank beside others."""


@dataclass(frozen=True, slots=True)
class Compared:
    kind: str
    run: str
    measured: float
    """GB."""
    estimate: float

    @property
    def off(self) -> float:
        """Above 0: the estimate is too high."""
        return self.estimate / self.measured - 1


def compared() -> Iterator[Compared]:
    (row,) = (r for r in read("many_gpus.json") if r["placement"] == "split" and r["device"] and not r["layers"])
    pack = (
        "rollout.explore.precision=fp8",
        f"learner.activation_memory={row['activation_memory']}",
    )
    found = cards(planned("flux1_dev", SHARED, *pack, "learner.micro_batch=6"))
    for measured, card in zip(sorted(row["peak_gb"], reverse=True), found, strict=True):
        yield Compared("split", f"flux1_dev: {' and '.join(card.roles)}", measured, card.peak / 1e9)
    for result, model, kept in WHOLE:
        measured = read(f"full_iteration_{result}.json")["peak_memory_gb"]
        settings = ("rollout.preview.prune=null", "compile.learner=false", f"learner.activation_memory={kept}")
        (card,) = cards(planned(model, THIRDS, *settings))
        # SANA was measured before processes freed their caches for one another.
        yield Compared("whole loop", model, measured, (older(card, in_turns=result != "sana") + WATCHER) / 1e9)


def planned(model: str, *settings: str) -> Arithmetic:
    files = [model, "two_stage", "diffusion_nft", "clipscore"]
    given = [
        "prompts={train: train.txt, heldout: heldout.txt}",
        "rollout.explore.precision=fp8",
        "evaluation={prompts: 1, samples: 1}",
    ]
    config = load(named.resolve([Path(file) for file in files]), [*given, *settings])
    shapes = shipped(config.model)
    assert shapes is not None
    return describe(config, facts_of(config, Sources(), shapes, pool_sampling(config).tier))


def older(card: CardMemory, *, in_turns: bool) -> int:
    """With everything on the card always; explorers kept what they had quantised until the first update."""
    held = sum(process.held for process in card.processes)

    def taken(*stages: str) -> int:
        return sum(sum(process.stages.get(stage, {}).values()) for process in card.processes for stage in stages)

    samplers, learner = taken(LOAD, EXPLORE, REGENERATE), taken(LEARN)
    return held + (max(samplers, learner) if in_turns else samplers + learner)


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def main() -> None:
    print(f"{'':<12}{'':<36}{'measured':>10}{'estimate':>10}")
    for row in compared():
        print(f"{row.kind:<12}{row.run:<36}{row.measured:>7.1f} GB{row.estimate:>7.1f} GB{row.off:>+7.1%}")


if __name__ == "__main__":
    main()
