"""Which model fits which GPU? Prints the table of the README, which a test compares with the plan.

    python benchmarks/fits.py

A cell has the planned hours of a whole run without evaluations, and whether frozen weights are offloaded while it
explores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from solrl_ray.cli.configured import on_card
from solrl_ray.config import checks, named
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.models import FAMILIES
from solrl_ray.models.paths import BUILTIN
from solrl_ray.models.shapes import FOLDER, shipped
from solrl_ray.planning import fitting
from solrl_ray.planning.arithmetic import Arithmetic, describe
from solrl_ray.planning.fitting import Gpu
from solrl_ray.planning.forecast import forecast
from solrl_ray.planning.outline import facts_of
from solrl_ray.planning.price_list import PriceList
from solrl_ray.planning.prices import Cluster, Unpriced, orchestration, price_list

PRESETS = ("sol_rl", "pickscore")
"""The other presets of the run."""
CLUSTERS = ((100e9, "one_gpu"), (60e9, "one_gpu_80gb"), (40e9, "one_gpu_48gb"), (0.0, "one_gpu_24gb"))
"""Minimum bytes of GPU memory, and the preset for it; the first match counts."""
GPUS = ("h200", "h100-80", "l40s", "rtx4090")
"""Columns: names for `solrl plan --gpu`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    model: str
    """Its name in configs/models."""
    cluster: str
    """The preset of configs/clusters."""
    fits: bool
    arithmetic: Arithmetic
    """Sizes; if it fits, with the settings that depend on the GPU."""

    @property
    def offloads(self) -> bool:
        return bool(self.arithmetic.config.fleet.offload)


def published() -> list[str]:
    """Names of the shipped image models with shipped sizes, without the testbed. Video models are left out, as they
    train with smaller pools.
    """
    files = {file.stem: json.loads(file.read_bytes()) for file in sorted(FOLDER.glob("*.json"))}
    return [
        name
        for name, shapes in files.items()
        if not shapes["path"].startswith(BUILTIN) and not FAMILIES[shapes["family"]].SIZES.frame_stride
    ]


def verdicts(gpu: Gpu, fastest: str) -> Iterator[Verdict]:
    """Yield a verdict for each published model on a GPU, with `fastest` as the GPU's fastest tier."""
    cluster = next(preset for least, preset in CLUSTERS if gpu.memory >= least)
    settings = ["prompts={train: train.txt, heldout: heldout.txt}", "rollout.explore.precision=auto"]
    for model in published():
        presets = named.resolve([Path(preset) for preset in (model, *PRESETS, cluster)])
        config = on_card(load(presets, settings), fastest)
        checks.check(config)
        shapes = shipped(config.model)
        assert shapes is not None
        facts = facts_of(config, Sources(), shapes, pool_sampling(config).tier)
        arithmetic = describe(fitting.with_activation_memory(config, facts, gpu), facts)
        made = fitting.fitted(arithmetic, gpu)
        yield Verdict(model=model, cluster=cluster, fits=made is not None, arithmetic=made or arithmetic)


def cell(verdict: Verdict, prices: PriceList) -> str:
    if not verdict.fits:
        return "–"
    try:
        made = forecast(verdict.arithmetic, prices, Cluster(gpu=prices.gpu), orchestration())
        text = f"{made.seconds * verdict.arithmetic.config.run.iterations / 3600:.1f} h"
    except Unpriced:
        text = "fits"
    return text + ", offload" * verdict.offloads


def table() -> list[str]:
    columns = []
    for gpu in GPUS:
        prices = price_list(gpu)
        assert prices.device is not None
        found = {verdict.model: cell(verdict, prices) for verdict in verdicts(prices.device, prices.fastest)}
        columns.append([found[model] for model in published()])
    rows = [f"| {' | '.join(cells)} |" for cells in zip((f"`{model}`" for model in published()), *columns, strict=True)]
    return [f"| `--gpu` | {' | '.join(GPUS)} |", "|---" * (len(GPUS) + 1) + "|", *rows]


if __name__ == "__main__":
    print("\n".join(table()))
