"""Which of the shipped models train on one card: for `solrl doctor`, and for a plan that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from solrl_ray.cli.configured import on_card
from solrl_ray.config import checks, named
from solrl_ray.config.loading import Sources, load, read_file
from solrl_ray.config.problems import listed
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.models import FAMILIES
from solrl_ray.models.paths import BUILTIN
from solrl_ray.models.shapes import shipped
from solrl_ray.plan import fitting
from solrl_ray.plan.arithmetic import Arithmetic, describe
from solrl_ray.plan.fitting import Card
from solrl_ray.plan.outline import facts_of

PARTS = ("sol_rl", "pickscore")
"""The other parts of the run."""
CLUSTERS = ((100e9, "one_gpu"), (60e9, "one_gpu_80gb"), (40e9, "one_gpu_48gb"), (0.0, "one_gpu_24gb"))
"""Minimum bytes of a card → its part; the first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    model: str
    """Its name in configs/models."""
    cluster: str
    """The part of configs/clusters."""
    fits: bool
    arithmetic: Arithmetic
    """With what the card decides, if it fits."""

    @property
    def offloads(self) -> bool:
        return bool(self.arithmetic.config.fleet.offload)


def published() -> list[str]:
    """The names of the shipped models of pictures, without the testbed. Videos are trained with smaller pools."""
    sections = {file.stem: read_file(file)["model"] for file in sorted((named.folder() / "models").glob("*.yaml"))}
    return [
        name
        for name, model in sections.items()
        if not model["path"].startswith(BUILTIN) and not FAMILIES[model["family"]].sizes.frame_stride
    ]


def verdicts(card: Card, fastest: str) -> Iterator[Verdict]:
    """For each published model, on a card with this fastest tier."""
    cluster = next(part for least, part in CLUSTERS if card.memory >= least)
    settings = ["prompts={train: train.txt, heldout: heldout.txt}", "rollout.explore.precision=auto"]
    for model in published():
        parts = named.resolve([Path(part) for part in (model, *PARTS, cluster)])
        config = on_card(load(parts, settings), fastest)
        checks.check(config)
        shapes = shipped(config.model)
        assert shapes is not None
        facts = facts_of(config, Sources(), shapes, pool_sampling(config).tier)
        arithmetic = describe(fitting.with_activation_memory(config, facts, card), facts)
        made = fitting.fitted(arithmetic, card)
        yield Verdict(model=model, cluster=cluster, fits=made is not None, arithmetic=made or arithmetic)


def fitting_models(card: Card, fastest: str) -> str:
    """Words that name the published models which train on one such card, and with which parts; empty if none does."""
    fit = [verdict for verdict in verdicts(card, fastest) if verdict.fits]
    if not fit:
        return ""
    named = listed([verdict.model for verdict in fit])
    return (
        f"one {card.name} has room for {named} with {' '.join((*PARTS, fit[0].cluster))} and your prompts (estimated)"
    )
