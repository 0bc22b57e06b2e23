"""How good is a plan's estimate of a card's memory? Peaks that were measured, beside today's estimate of the same run.

    python benchmarks/card_peaks.py

    limited card    memory_limit.py
    H100            many_gpus.py, one GPU
    assumed         full_iteration.py on an H200, of models whose activations are assumed
    whole loop      full_iteration.py on an H200, in an older version: its estimate contains what that did not free, and
                    the context of the process that read the peak

Each is estimated with the settings that the run had at the time. Needs no GPU; reads benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solrl_ray.cli.outline import facts_of
from solrl_ray.config import fitting, named
from solrl_ray.config.arithmetic import Arithmetic, describe
from solrl_ray.config.card_memory import EXPLORE, LEARN, LOAD, REGENERATE, ROLL_OUT, CardMemory, Sharing, cards
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.models.shapes import shipped

RESULTS = Path(__file__).parent / "results"
H100 = fitting.Card(name="an H100", memory=85e9)
WATCHER = 500_000_000
"""Bytes of the process that read the peaks of whole loops: a context without kernels."""
LIMITED = (
    ("flux_76", "flux1_dev", "one_gpu_80gb", "learner.micro_batch=6"),
    ("flux_45", "flux1_dev", "one_gpu_48gb", "learner.activation_memory=0"),
    ("sana_76", "sana_1600m", "one_gpu_80gb", "learner.micro_batch=16"),
    ("sana_45", "sana_1600m", "one_gpu_48gb", "learner.micro_batch=4"),
    ("sana_22", "sana_1600m", "one_gpu_24gb", "learner.micro_batch=2"),
    ("sd3_45", "sd35_large", "one_gpu_48gb", "learner.micro_batch=1"),
    ("sd3_medium_22", "sd35_medium", "one_gpu_24gb", "learner.micro_batch=9"),
)
"""Name of the result, model, cluster part, and what that part had, or the card decided, at the time of the run."""
ON_H100 = (("flux_1-gpus", "flux1_dev"), ("sd3_1-gpus", "sd35_large"), ("sana_1-gpus", "sana_1600m"))
"""Beginning of the variant, model."""
ASSUMED: tuple[tuple[str, Sharing], ...] = (("z_image", "keep"), ("qwen_image", "lay_down"))
"""Model, `fleet.sharing`."""
WHOLE = (("flux", "flux1_dev", 0), ("sd3", "sd35_large", 1), ("sana", "sana_1600m", 1))
"""Name of the result, model, `learner.activation_memory`."""


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
    for result, model, part, then in LIMITED:
        found = read(f"memory_limit_{result}.json")
        changes = (f"{key}={value}" for key, value in found["changes"].items())
        (card,) = cards(planned(model, part, "rollout.preview.prune=null", then, *changes))
        yield Compared("limited card", result, found["peak_gb"], card.peak(found["changes"]["fleet.sharing"]) / 1e9)
    for beginning, model in ON_H100:
        config = planned(model, "one_gpu_80gb")
        assert config.facts is not None
        settled = fitting.settled(config.config, config.facts, H100)
        (card,) = cards(describe(settled, config.facts))
        for row in (row for row in read("many_gpus.json") if row["variant"].startswith(beginning)):
            assert settled.learner.activation_memory == row["activation_memory"]
            of = f"{model}, {row['prompts']} prompts"
            yield Compared("H100", of, max(row["peak_gb"]), card.peak(row["planned"]["sharing"]) / 1e9)
    for model, sharing in ASSUMED:
        (card,) = cards(planned(model, "one_gpu", "learner.activation_memory=1"))
        measured = read(f"full_iteration_{model}.json")["peak_memory_gb"]
        yield Compared("assumed", model, measured, card.peak(sharing) / 1e9)
    for result, model, kept in WHOLE:
        measured = read(f"full_iteration_{result}.json")["peak_memory_gb"]
        settings = ("rollout.preview.prune=null", "compile.learner=false", f"learner.activation_memory={kept}")
        (card,) = cards(planned(model, *settings))
        # SANA was measured before workers freed their caches for one another.
        peak = without_turns(card) if result == "sana" else freed_late(card)
        yield Compared("whole loop", model, measured, (peak + WATCHER) / 1e9)


def planned(model: str, *parts: str) -> Arithmetic:
    """As the benchmarks run: parts, then settings, with all workers on one GPU."""
    third = "num_gpus: 0.33"
    files = [model, "two_stage", "diffusion_nft", "clipscore", *(part for part in parts if "=" not in part)]
    settings = [
        "prompts={train: train.txt, heldout: heldout.txt}",
        "rollout.explore.precision=fp8",
        "evaluation={prompts: 1, samples: 1}",
        f"fleet={{explorers: {{{third}}}, regenerators: {{{third}}}, learners: {{{third}}}}}",
    ]
    config = load(named.resolve([Path(file) for file in files]), settings + [part for part in parts if "=" in part])
    shapes = shipped(config.model)
    assert shapes is not None
    return describe(config, facts_of(config, Sources(), shapes, pool_sampling(config).tier))


def freed_late(card: CardMemory) -> int:
    """Explorers kept what they had quantised until the first update then."""
    return max(card.turn(ROLL_OUT, "keep") + sum(w.taken(LOAD) for w in card.occupants), card.peak("keep"))


def without_turns(card: CardMemory) -> int:
    held = sum(worker.laid_down + worker.staying for worker in card.occupants)
    return held + sum(worker.taken(LOAD, EXPLORE, REGENERATE, LEARN) for worker in card.occupants)


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def main() -> None:
    print(f"{'':<14}{'':<24}{'measured':>10}{'estimate':>10}")
    for row in compared():
        print(f"{row.kind:<14}{row.run:<24}{row.measured:>7.1f} GB{row.estimate:>7.1f} GB{row.off:>+7.1%}")


if __name__ == "__main__":
    main()
